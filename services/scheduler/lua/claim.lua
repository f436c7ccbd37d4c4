-- A try under an idempotency key: begins what the key stands for, or finds it. A key whose claim has expired is new.
-- KEYS: 1 the key, 2 the org's keys
-- ARGV: 1 org, 2 hash of the key, 3 digest, 4 request id, 5 seed, 6 model, 7 version, 8 ms until the deadline, 9 ms that it is kept after the end,
--       10 most keys of an org
-- Output: {'claimed', tries, request id, seed, model, version, ms when the first came} | {'reused'}
local org, keep = ARGV[1], tonumber(ARGV[9])
local longest = int(tonumber(ARGV[8]) + keep)

local function outlive(key)
  if redis.call('PEXPIRE', key, longest, 'NX') == 0 then redis.call('PEXPIRE', key, longest, 'GT') end
end

local stem = redis.call('GET', KEYS[1])
if not stem or redis.call('EXISTS', K.claim .. stem) == 0 then
  stem = string.sub(ARGV[4], 1, -3)
  redis.call('SET', KEYS[1], stem)
  redis.call('HSET', K.claim .. stem, 'digest', ARGV[3], 'seed', ARGV[5], 'model', ARGV[6], 'version', ARGV[7], 'at', int(NOW), 'keep', int(keep))
elseif redis.call('HGET', K.claim .. stem, 'digest') ~= ARGV[3] then
  return {'reused'}
end
local tries = redis.call('HINCRBY', K.claim .. stem, 'tries', 1)

if not redis.call('ZSCORE', KEYS[2], ARGV[2]) and redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[10]) then
  local oldest = K.once .. org .. ':' .. redis.call('ZPOPMIN', KEYS[2])[1]
  local its = redis.call('GET', oldest)
  redis.call('DEL', oldest)
  if its then redis.call('DEL', K.claim .. its) end
end
redis.call('ZADD', KEYS[2], int(NOW), ARGV[2])
for _, key in ipairs({KEYS[1], KEYS[2], K.claim .. stem}) do outlive(key) end

local f = redis.call('HMGET', K.claim .. stem, 'seed', 'model', 'version', 'at')
return {'claimed', tries, stem .. '00', f[1], f[2], f[3], tonumber(f[4])}
