-- In front of every script: files and jobs. What is stored is counted per org and in all; a job is over when every line has a result.

local OVER = {failed = true, completed = true, expired = true, cancelled = true}
local NEXT = {in_progress = 'completed', finalizing = 'expired', cancelling = 'cancelled'}
local VERDICTS = {finalizing = 'batch_expired', cancelling = 'batch_cancelled'}

local function count_bytes(org, bytes)
  for _, whose in ipairs({org, ''}) do
    if redis.call('HINCRBY', K.stored, whose, int(bytes)) <= 0 then redis.call('HDEL', K.stored, whose) end
  end
end

local function stored_bytes(org)
  local f = redis.call('HMGET', K.stored, org, '')
  return tonumber(f[1] or 0), tonumber(f[2] or 0)
end

local function drop_file(id)
  local f = redis.call('HMGET', K.file .. id, 'org', 'bytes')
  redis.call('ZREM', K.expiring, 'file:' .. id)
  if not f[1] then return end
  count_bytes(f[1], -tonumber(f[2] or 0))
  redis.call('ZREM', K.files .. f[1], id)
  redis.call('UNLINK', K.file .. id, K.parts .. id, K.starts .. id, K.results .. id)
end

local BATCH_FIELDS = {'org', 'status', 'input', 'output', 'error', 'endpoint', 'total', 'completed', 'failed', 'expires', 'paused', 'keep',
                      'checks', 'waiting_for'}

-- The job's fields by name, or nil if there is no such job. Numbers are still strings.
local function read_batch(id)
  local values = redis.call('HMGET', K.batch .. id, unpack(BATCH_FIELDS))
  if not values[1] then return nil end
  local batch = {id = id}
  for i, name in ipairs(BATCH_FIELDS) do batch[name] = values[i] or nil end
  return batch
end

local function set_status(b, status)
  b.status = status
  redis.call('HSET', K.batch .. b.id, 'status', status, status .. '_at', int(NOW))
end

-- Its results become files, its input is one reader less, and the time begins after which it goes.
local function close_batch(b, status)
  if status == 'completed' then set_status(b, 'finalizing') end
  set_status(b, status)
  local goes = int(NOW + tonumber(b.keep))
  redis.call('SREM', K.open .. b.org, b.id)
  redis.call('ZREM', K.ready, b.id)
  redis.call('HDEL', K.batch .. b.id, 'paused', 'waiting_for')
  redis.call('UNLINK', K.todo .. b.id, K.taken .. b.id, K.tries .. b.id, K.strikes .. b.id)
  redis.call('ZADD', K.expiring, goes, 'batch:' .. b.id)
  if redis.call('EXISTS', K.file .. b.input) == 1 then redis.call('HINCRBY', K.file .. b.input, 'users', -1) end
  for _, file in ipairs({b.output, b.error}) do
    if redis.call('EXISTS', K.file .. file) == 1 then
      redis.call('HSET', K.file .. file, 'state', 'whole', 'created', int(NOW), 'expires', goes)
      redis.call('ZADD', K.files .. b.org, int(NOW), file)
      redis.call('ZADD', K.expiring, goes, 'file:' .. file)
    end
  end
end

-- Closes a job whose every line has a result.
local function conclude(b)
  local f = redis.call('HMGET', K.batch .. b.id, 'total', 'completed', 'failed')
  if NEXT[b.status] and tonumber(f[2] or 0) + tonumber(f[3] or 0) >= tonumber(f[1] or 0) then close_batch(b, NEXT[b.status]) end
end

-- There may be a line to take from then on; what was known to be earlier stands.
local function ready_at(id, at)
  local known = redis.call('ZSCORE', K.ready, id)
  if not known or tonumber(known) > at then redis.call('ZADD', K.ready, int(at), id) end
end

-- Whether this epoch is the last that took the line, and it has no result.
local function holds(id, line, epoch)
  local held = redis.call('ZSCORE', K.taken .. id, line) or redis.call('ZSCORE', K.todo .. id, line)
  return held and redis.call('HGET', K.tries .. id, line) == epoch
end

