-- A worker's stream has broken: nobody places there until it is heard of again. Its leases stay; gateways see for themselves.
-- KEYS: 1 worker
-- ARGV: 1 incarnation
-- Output: 1 if it was marked, 0 if another incarnation has taken over
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'down', 1)
return 1
