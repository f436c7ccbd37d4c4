-- A scheduler that leaves lets another place models.
-- KEYS: 1 placer
-- ARGV: 1 scheduler instance
-- Output: 1 if it was this one, else 0
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
