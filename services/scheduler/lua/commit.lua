-- Places a queued ticket on a worker, if both are still what the policy saw. Room is debited at once, and so is the org's turn.
-- KEYS: 1 ticket, 2 worker, 3 the worker's leases, 4 what was placed of the model lately
-- ARGV: 1 request id, 2 worker id, 3 incarnation, 4 address, 5 slots, 6 blocks, 7 slots in all, 8 blocks in all,
--       9 lowest class whose holdings count against this one (3: all), 10 scheduler instance, 11 blocks that the org may hold,
--       12 tokens of the prompt, 13 output tokens expected, 14 the org's weight, 15 why it goes there (JSON)
-- Output: {'placed', lease...} | {'refused', why: ticket, deadline, suspect, incarnation, down, refusing, room or share}
local AWAIT_MS = 30000  -- so long a request that workers may die of waits for those to come back and say so
local id = ARGV[1]
local t = read_ticket(id)
if not t or t.state ~= 'queued' then return {'refused', 'ticket'} end
if tonumber(t.deadline or NOW) <= NOW then return {'refused', 'deadline'} end
if t.awaits and NOW - tonumber(t.asked or 0) < AWAIT_MS then
  for _, dead in ipairs(cjson.decode(t.awaits)) do
    if redis.call('HGET', K.worker .. dead[1], 'incarnation') == dead[2] then return {'refused', 'suspect'} end
  end
end

local w = redis.call('HMGET', KEYS[2], 'incarnation', 'down', 'refusing', org_field(t), 'slots:0', 'slots:1', 'slots:2', 'slots:3',
                     'blocks:0', 'blocks:1', 'blocks:2', 'blocks:3')
if w[1] ~= ARGV[3] then return {'refused', 'incarnation'} end
if w[2] == '1' then return {'refused', 'down'} end
if w[3] == '1' then return {'refused', 'refusing'} end

local slots, blocks = tonumber(ARGV[5]), tonumber(ARGV[6])
local slots_then, blocks_then = slots, blocks
for class = 0, tonumber(ARGV[9]) do
  slots_then = slots_then + (w[5 + class] or 0)
  blocks_then = blocks_then + (w[9 + class] or 0)
end
if slots_then > tonumber(ARGV[7]) or blocks_then > tonumber(ARGV[8]) then return {'refused', 'room'} end
if blocks + (w[4] or 0) > tonumber(ARGV[11]) then return {'refused', 'share'} end

local expected = tonumber(ARGV[13])
local tokens = ARGV[12] + expected
t.weight = ARGV[14]
give(t, tokens)
local recent = recent_tokens(KEYS[4])
recent[tonumber(t.class)] = recent[tonumber(t.class)] + tokens
redis.call('HSET', KEYS[4], 'at', int(NOW), '1', real(recent[1]), '2', real(recent[2]), '3', real(recent[3]))
redis.call('EXPIRE', KEYS[4], IDLE_SECONDS)

dequeue(t)
t.epoch, t.worker, t.incarnation, t.address, t.placed, t.decision = tonumber(t.epoch) + 1, ARGV[2], ARGV[3], ARGV[4], NOW, ARGV[15]
redis.call('HSET', KEYS[1], 'state', 'placed', 'epoch', int(t.epoch), 'worker', t.worker, 'incarnation', t.incarnation, 'address', t.address,
           'placed', int(NOW), 'slots', slots, 'blocks', blocks, 'counted_slots', slots, 'counted_blocks', blocks, 'started', 0,
           'given', int(tokens), 'expected', int(expected), 'weight', t.weight, 'decision', t.decision)
count_room(t, slots, blocks)
redis.call('SADD', KEYS[3], id)
redis.call('ZADD', K.starting, NOW, id)
local lease = lease_of(t)
publish({event = 'placed', lease = lease, line = t.line, from = ARGV[10]})
return {'placed', unpack(lease)}
