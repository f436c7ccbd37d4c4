-- Places a queued ticket on a worker, if both are still what the policy saw. Room is debited at once.
-- KEYS: 1 ticket, 2 worker, 3 the worker's leases
-- ARGV: 1 request id, 2 worker id, 3 incarnation, 4 address, 5 slots, 6 blocks, 7 slots in all, 8 blocks in all,
--       9 lowest class whose holdings count against this one (3: all), 10 scheduler instance
-- Output: {'placed', lease...} | {'refused', why: ticket, incarnation, down, refusing or room}
local id = ARGV[1]
local t = read_ticket(id)
if not t or t.state ~= 'queued' then return {'refused', 'ticket'} end

local flags = redis.call('HMGET', KEYS[2], 'incarnation', 'down', 'refusing')
if flags[1] ~= ARGV[3] then return {'refused', 'incarnation'} end
if flags[2] == '1' then return {'refused', 'down'} end
if flags[3] == '1' then return {'refused', 'refusing'} end

local slots, blocks = used_room(redis.call('HGETALL', KEYS[2]), tonumber(ARGV[9]))
if slots + ARGV[5] > tonumber(ARGV[7]) or blocks + ARGV[6] > tonumber(ARGV[8]) then return {'refused', 'room'} end

dequeue(t)
t.epoch, t.worker, t.incarnation, t.address, t.placed = tonumber(t.epoch) + 1, ARGV[2], ARGV[3], ARGV[4], NOW
redis.call('HSET', KEYS[1], 'state', 'placed', 'epoch', int(t.epoch), 'worker', t.worker, 'incarnation', t.incarnation, 'address', t.address,
           'placed', int(NOW), 'slots', ARGV[5], 'blocks', ARGV[6], 'counted_slots', ARGV[5], 'counted_blocks', ARGV[6], 'started', 0)
count_room(t, tonumber(ARGV[5]), tonumber(ARGV[6]))
redis.call('SADD', KEYS[3], id)
redis.call('ZADD', K.starting, NOW, id)
local lease = lease_of(t)
publish({event = 'placed', lease = lease, line = t.line, from = ARGV[10]})
return {'placed', unpack(lease)}
