-- Who places models on devices: one scheduler at a time, for as long as it comes back in time. What it goes by, for that one.
-- KEYS: 1 placer, 2 affinity, 3.. recent of the models
-- ARGV: 1 scheduler instance, 2 ms until another may take over, then the models
-- Output: {} while another does, else {unix ms, affinity flat (field, JSON, ...), tokens per second of each model, as strings}
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return {} end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
local rates = {}
for i = 3, #KEYS do
  local recent = recent_tokens(KEYS[i])
  rates[#rates + 1] = real((recent[1] + recent[2] + recent[3]) * 1000 / RECENT_MS)
end
return {int(NOW), redis.call('HGETALL', KEYS[2]), rates}
