-- Adds a part to a file, which its first part begins. A part that is there already changes nothing.
-- KEYS: 1 file, 2 its parts, 3 where they begin, 4 the org's files
-- ARGV: 1 file id, 2 org, 3 part number, 4 text, 5 number of its first line; most 6 bytes of a file, 7 of an org, 8 of all, 9 files of an org;
--       10 ms that an unfinished file is kept
-- Output: 'done', or with nothing changed 'file', 'org', 'all' or 'files' (the bound that it would break) or 'none' (it is another's, or has ended)
local org, size = ARGV[2], #ARGV[4]
local f = redis.call('HMGET', KEYS[1], 'org', 'state', 'bytes')
if f[1] and (f[1] ~= org or f[2] ~= 'coming') then return 'none' end
if redis.call('HEXISTS', KEYS[2], ARGV[3]) == 1 then return 'done' end
local of_org, of_all = stored_bytes(org)
if tonumber(f[3] or 0) + size > tonumber(ARGV[6]) then return 'file' end
if of_org + size > tonumber(ARGV[7]) then return 'org' end
if of_all + size > tonumber(ARGV[8]) then return 'all' end
if not f[1] then
  if redis.call('ZCARD', KEYS[4]) >= tonumber(ARGV[9]) then return 'files' end
  redis.call('HSET', KEYS[1], 'org', org, 'state', 'coming', 'bytes', 0, 'created', int(NOW))
end
redis.call('HSET', KEYS[2], ARGV[3], ARGV[4])
redis.call('ZADD', KEYS[3], ARGV[5], ARGV[3])
redis.call('HINCRBY', KEYS[1], 'bytes', size)
redis.call('ZADD', K.expiring, int(NOW + tonumber(ARGV[10])), 'file:' .. ARGV[1])
count_bytes(org, size)
return 'done'
