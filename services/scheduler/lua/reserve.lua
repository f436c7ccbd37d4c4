-- Takes the quota of several tickets of one org, or of none. Each waits to be queued, and is forgotten like a ticket without a Place stream.
-- Idempotent: what a ticket holds already isn't taken again, and one that has come further is left as it is.
-- KEYS: none
-- ARGV: 1 org, 2 quota (JSON, see reserve), then of each ticket: request id, its queue, tokens to reserve
-- Output: {'reserved', quota state} | {'over', quota state, kinds, ms until the buckets have enough}
local org, quota, wants, fresh = ARGV[1], cjson.decode(ARGV[2]), {}, {}
for i = 3, #ARGV, 3 do
  local t = read_ticket(ARGV[i])
  if not t or t.state == 'reserved' then
    wants[#wants + 1] = {ARGV[i], tonumber(ARGV[i + 2])}
    fresh[#fresh + 1] = {ARGV[i], ARGV[i + 1]}
  end
end

local state, short, wait = reserve(org, quota, wants, false)
if short then return {'over', state, short, wait} end
for _, ticket in ipairs(fresh) do
  redis.call('HSET', K.ticket .. ticket[1], 'state', 'reserved', 'epoch', 0, 'queue', ticket[2])
  redis.call('ZADD', K.held, NOW, ticket[1])
end
return {'reserved', state}
