-- Ends queued tickets whose deadline has passed, and what nobody has spoken for: queued and reserved tickets without a Place stream, leases
-- that never started, leases not renewed.
-- Time in which no scheduler swept (Redis or all of them were away, or its clock jumped) is held against nobody.
-- KEYS: 1 held, 2 starting, 3 running, 4 swept, 5 deadlines
-- ARGV: ms until 1 a ticket without a stream, 2 a lease that didn't start, 3 a lease not renewed is overdue;
--       4 longest pause between sweeps that counts as none (ms), 5 most to end of each kind
-- Output: list of {request id, reason: deadline, dropped, not started or expired, line, epoch, worker, output tokens}
local swept = redis.call('HMGET', KEYS[4], 'at', 'since')
local since = tonumber(swept[2] or NOW)
local gap = NOW - tonumber(swept[1] or 0)
if gap < 0 or gap > tonumber(ARGV[4]) then since = NOW end
redis.call('HSET', KEYS[4], 'at', int(NOW), 'since', int(since))

local ended = {}
local function end_all(key, ids, reason, finish)
  for _, id in ipairs(ids) do
    redis.call('ZREM', key, id)
    local t = read_ticket(id)
    if t and finish(t, reason) then
      ended[#ended + 1] = {id, reason, t.line or '', tonumber(t.epoch), t.worker or '', tonumber(t.tokens or 0)}
    end
  end
end

local function sweep(key, ttl, reason, finish)
  if NOW - since < ttl then return end
  local overdue = redis.call('ZRANGEBYSCORE', key, '-inf', int(NOW - ttl), 'LIMIT', 0, ARGV[5])
  -- Seen in the future: the clock was set back, and nothing has spoken for it since.
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key, int(NOW + ttl), '+inf', 'LIMIT', 0, ARGV[5])) do overdue[#overdue + 1] = id end
  end_all(key, overdue, reason, finish)
end

local function end_queued(t, reason)
  if t.state == 'reserved' then release(t) end
  if t.state ~= 'queued' then return false end
  drop(t, reason)
  return true
end

local function end_placed(t)
  if t.state ~= 'placed' then return false end
  end_lease(t, 'expired')
  return true
end

end_all(KEYS[5], redis.call('ZRANGEBYSCORE', KEYS[5], '-inf', int(NOW), 'LIMIT', 0, ARGV[5]), 'deadline', end_queued)
sweep(KEYS[1], tonumber(ARGV[1]), 'dropped', end_queued)
sweep(KEYS[2], tonumber(ARGV[2]), 'not started', end_placed)
sweep(KEYS[3], tonumber(ARGV[3]), 'expired', end_placed)
redis.call('ZREMRANGEBYSCORE', K.serving, '-inf', int(NOW - 3600000))  -- Models that left an hour ago.
return ended
