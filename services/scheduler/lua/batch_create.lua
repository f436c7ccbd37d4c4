-- Begins a job, or finds the one that an idempotency key has begun.
-- KEYS: 1 job, 2 its input file, 3 the org's open jobs, 4 the org's jobs, 5 the idempotency key, or left out
-- ARGV: 1 job id, 2 org, 3 input file, 4 endpoint, 5 ms in which it is to be done, 6 metadata, 7 output file, 8 error file, 9 ms that it is kept
--       after its end, 10 most open jobs of an org, 11 most jobs of an org, 12 fingerprint of the request
-- Output: {'made' or 'known', job id}, or with nothing changed {'none' (no such file), 'full' or 'differs' (the key is another request's)}
local org = ARGV[2]
if redis.call('HGET', KEYS[1], 'org') == org then return {'made', ARGV[1]} end
if KEYS[5] then
  local known = redis.call('GET', KEYS[5])
  if known then
    local id, fingerprint = unpack(cjson.decode(known))
    if fingerprint ~= ARGV[12] then return {'differs'} end
    if redis.call('EXISTS', K.batch .. id) == 1 then return {'known', id} end
  end
end
local f = redis.call('HMGET', KEYS[2], 'org', 'state', 'purpose')
if f[1] ~= org or f[2] ~= 'whole' or f[3] ~= 'batch' then return {'none'} end
if redis.call('SCARD', KEYS[3]) >= tonumber(ARGV[10]) or redis.call('ZCARD', KEYS[4]) >= tonumber(ARGV[11]) then return {'full'} end
redis.call('HSET', KEYS[1], 'org', org, 'status', 'validating', 'input', ARGV[3], 'endpoint', ARGV[4], 'window', ARGV[5],
           'expires', int(NOW + tonumber(ARGV[5])), 'metadata', ARGV[6], 'output', ARGV[7], 'error', ARGV[8], 'keep', ARGV[9],
           'created', int(NOW), 'checks', 0)
redis.call('HINCRBY', KEYS[2], 'users', 1)
redis.call('SADD', KEYS[3], ARGV[1])
redis.call('ZADD', KEYS[4], int(NOW), ARGV[1])
redis.call('ZADD', K.ready, int(NOW), ARGV[1])
if KEYS[5] then redis.call('SET', KEYS[5], cjson.encode({ARGV[1], ARGV[12]}), 'PX', ARGV[9]) end
return {'made', ARGV[1]}
