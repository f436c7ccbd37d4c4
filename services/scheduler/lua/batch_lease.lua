-- Takes lines to run, those of orgs and then jobs with the fewest in flight first, and jobs to check.
-- KEYS: 1 ready
-- ARGV: 1 most lines, 2 ms of a lease, 3 bytes of an org and 4 of all from which no new results are made room for, 5 ms until that is looked at again
-- Output: list of {'line', job, line, epoch, org, endpoint, input file, part, its first line, ms left, strikes, verdict}
--         and {'check', job, epoch, org, endpoint, input file}
local MOST_JOBS = 64  -- to look at; the others' turn comes, as who was served goes to the end
local most, lease = tonumber(ARGV[1]), tonumber(ARGV[2])
local work, jobs, flying = {}, {}, {}

local function check(b)
  if NOW >= tonumber(b.expires) then return close_batch(b, 'expired') end
  work[#work + 1] = {'check', b.id, redis.call('HINCRBY', K.batch .. b.id, 'checks', 1), b.org, b.endpoint, b.input}
  redis.call('ZADD', KEYS[1], int(NOW + lease), b.id)
end

-- Whether its lines are to wait: for its pause to be over, or for room for their results.
local function waits(b)
  if VERDICTS[b.status] then return false end
  local of_org, of_all = stored_bytes(b.org)
  local full = of_org >= tonumber(ARGV[3]) or of_all >= tonumber(ARGV[4])
  if full then redis.call('HSET', K.batch .. b.id, 'waiting_for', 'storage')
  elseif b.waiting_for then redis.call('HDEL', K.batch .. b.id, 'waiting_for') end
  local until_ms = math.min(math.max(tonumber(b.paused or 0), full and NOW + tonumber(ARGV[5]) or 0), tonumber(b.expires))
  if until_ms > NOW then redis.call('ZADD', KEYS[1], int(until_ms), b.id) end
  return until_ms > NOW
end

local function first_score(key)
  return tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2] or math.huge)
end

-- When there may be a line to take again.
local function look_again(b)
  if not redis.call('ZSCORE', KEYS[1], b.id) then return end  -- it is over
  local at = math.min(VERDICTS[b.status] and redis.call('ZCARD', K.todo .. b.id) > 0 and 0 or first_score(K.todo .. b.id),
                      first_score(K.taken .. b.id))
  if at == math.huge then return conclude(b) end
  if not VERDICTS[b.status] then at = math.min(at, tonumber(b.expires)) end
  redis.call('ZADD', KEYS[1], int(math.max(at, NOW)), b.id)
end

local function survey(b)
  if b.status == 'in_progress' and NOW >= tonumber(b.expires) then set_status(b, 'finalizing') end
  for _, line in ipairs(redis.call('ZRANGEBYSCORE', K.taken .. b.id, '-inf', int(NOW), 'LIMIT', 0, 1000)) do
    redis.call('ZREM', K.taken .. b.id, line)
    redis.call('HINCRBY', K.strikes .. b.id, line, 1)
    redis.call('ZADD', K.todo .. b.id, line, line)
  end
  if waits(b) then return end
  local until_ms = VERDICTS[b.status] and '+inf' or int(NOW)
  b.lines = redis.call('ZRANGEBYSCORE', K.todo .. b.id, '-inf', until_ms, 'LIMIT', 0, most)
  if #b.lines == 0 then return look_again(b) end
  b.next = 1
  b.flying = redis.call('ZCARD', K.taken .. b.id)
  flying[b.org] = (flying[b.org] or 0) + b.flying
  jobs[#jobs + 1] = b
end

local function take(b)
  local line = b.lines[b.next]
  b.next = b.next + 1
  b.flying = b.flying + 1
  flying[b.org] = flying[b.org] + 1
  redis.call('ZREM', K.todo .. b.id, line)
  redis.call('ZADD', K.taken .. b.id, int(NOW + lease), line)
  local part = redis.call('ZREVRANGEBYSCORE', K.starts .. b.input, line, '-inf', 'WITHSCORES', 'LIMIT', 0, 1)
  work[#work + 1] = {'line', b.id, line, redis.call('HINCRBY', K.tries .. b.id, line, 1), b.org, b.endpoint, b.input, part[1], part[2],
                     int(tonumber(b.expires) - NOW), redis.call('HGET', K.strikes .. b.id, line) or 0, VERDICTS[b.status] or ''}
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', int(NOW), 'LIMIT', 0, MOST_JOBS)) do
  local b = read_batch(id)
  if not b or OVER[b.status] then redis.call('ZREM', KEYS[1], id)
  elseif b.status == 'validating' then check(b)
  else survey(b) end
end
for _ = 1, most do
  local best
  for _, b in ipairs(jobs) do
    local less = not best or flying[b.org] < flying[best.org] or flying[b.org] == flying[best.org] and b.flying < best.flying
    if b.next <= #b.lines and less then best = b end
  end
  if not best then break end
  take(best)
end
for _, b in ipairs(jobs) do
  if b.next > 1 then look_again(b) end
end
return work
