-- How things stand, for metrics, operators and the judgement that nobody serves a model. Reads only.
-- KEYS: 1 queues, 2 serving, 3 starting, 4 running
-- ARGV: none
-- Output: {queues: {name, tickets, ms that the oldest has waited}, serving: {[model, version], ms since}, live leases}
local queues = {}
for _, queue in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local first = redis.call('ZRANGE', K.fifo .. queue, 0, 0, 'WITHSCORES')
  if first[1] then
    queues[#queues + 1] = {queue, redis.call('ZCARD', K.fifo .. queue), math.max(0, NOW - math.floor(first[2] / 1000))}
  end
end
local serving = {}
local seen = redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')
for i = 1, #seen, 2 do serving[#serving + 1] = {seen[i], math.max(0, NOW - seen[i + 1])} end
return {queues, serving, redis.call('ZCARD', KEYS[3]) + redis.call('ZCARD', KEYS[4])}
