-- Writes the affinity matrix anew, if this scheduler still is the one that places models.
-- KEYS: 1 placer, 2 affinity
-- ARGV: 1 scheduler instance, 2 seconds to keep it, then field and JSON of each entry
-- Output: 1, or 0 where another places models now
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[2])
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
if #ARGV > 2 then redis.call('EXPIRE', KEYS[2], ARGV[2]) end
return 1
