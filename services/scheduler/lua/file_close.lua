-- Ends a file whose parts are all there. Ended again, it stays as it is.
-- KEYS: 1 file, 2 its parts, 3 the org's files
-- ARGV: 1 file id, 2 org, 3 name, 4 purpose, 5 number of parts, 6 ms that it is kept
-- Output: 'done', or with nothing changed 'none' (there is no such file) or 'parts' (some are missing)
local f = redis.call('HMGET', KEYS[1], 'org', 'state')
if f[1] ~= ARGV[2] then return 'none' end
if f[2] == 'whole' then return 'done' end
if redis.call('HLEN', KEYS[2]) ~= tonumber(ARGV[5]) then return 'parts' end
local goes = int(NOW + tonumber(ARGV[6]))
redis.call('HSET', KEYS[1], 'state', 'whole', 'name', ARGV[3], 'purpose', ARGV[4], 'created', int(NOW), 'expires', goes, 'users', 0)
redis.call('ZADD', KEYS[3], int(NOW), ARGV[1])
redis.call('ZADD', K.expiring, goes, 'file:' .. ARGV[1])
return 'done'
