-- A worker introduces itself. Another incarnation than the last has none of its leases: they end, their tickets may come back.
-- KEYS: 1 worker, 2 its leases
-- ARGV: 1 worker id, 2 incarnation
-- Output: number of leases that ended
local known = redis.call('HGET', KEYS[1], 'incarnation')
if known == ARGV[2] then
  redis.call('HDEL', KEYS[1], 'down')
  return 0
end
local ended = 0
for _, id in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  local t = read_ticket(id)
  if t and t.state == 'placed' and t.worker == ARGV[1] and t.incarnation ~= ARGV[2] then
    end_lease(t, 'expired')
    ended = ended + 1
  end
end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], 'incarnation', ARGV[2])
return ended
