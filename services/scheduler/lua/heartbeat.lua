-- A worker lists what it works on: leases are renewed, room is counted afresh, and what is no lease of its any more comes back.
-- A lease that Redis has lost (flushed, or an older copy) is taken from the worker's word, because its stream is running.
-- KEYS: 1 worker, 2 its leases
-- ARGV: 1 worker id, 2 incarnation, 3 address, 4 blocks in use, 5 number of [model, version] served, those,
--       then request id, epoch, output tokens and blocks held of each lease
-- Output: {'other incarnation'} | {'ok', request id, epoch, ... of the leases to revoke}
local worker, incarnation, address = ARGV[1], ARGV[2], ARGV[3]
local known = redis.call('HGET', KEYS[1], 'incarnation')
if known and known ~= incarnation then return {'other incarnation'} end

local num_served = tonumber(ARGV[5])
for i = 6, 5 + num_served do redis.call('ZADD', K.serving, NOW, ARGV[i]) end

-- May this lease go on? Revives it where Redis had given it up or forgotten it.
local function renew(id, epoch)
  local t = read_ticket(id)
  local behind = not t or tonumber(t.epoch) < epoch
  local mine = t and tonumber(t.epoch) == epoch and t.worker == worker and t.incarnation == incarnation
  if mine and t.state == 'placed' then return t end
  if not behind and not (mine and t.state == 'ended' and t.reason == 'expired') then return nil end
  if t and t.state == 'queued' then dequeue(t) end
  if t and t.state == 'placed' then end_lease(t, 'expired') end
  redis.call('PERSIST', K.ticket .. id)
  redis.call('HSET', K.ticket .. id, 'state', 'placed', 'epoch', int(epoch), 'worker', worker, 'incarnation', incarnation, 'address', address)
  redis.call('HSETNX', K.ticket .. id, 'order', int(NOW_US))
  redis.call('HSETNX', K.ticket .. id, 'slots', 1)
  if t then revive(t) end
  return read_ticket(id)
end

local revoked, listed, held_in_all = {'ok'}, {}, 0
local slots, blocks, of_orgs = {}, {}, {}
local function count(t, num_slots, num_blocks)
  local class = t.class or '0'
  slots[class] = (slots[class] or 0) + num_slots
  blocks[class] = (blocks[class] or 0) + num_blocks
  if t.queue then of_orgs[org_field(t)] = (of_orgs[org_field(t)] or 0) + num_blocks end
  redis.call('HSET', K.ticket .. t.id, 'counted_slots', num_slots, 'counted_blocks', num_blocks)
end

for i = 6 + num_served, #ARGV, 4 do
  local id, epoch, tokens, held = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2], tonumber(ARGV[i + 3])
  local t = renew(id, epoch)
  held_in_all = held_in_all + held
  if t then
    listed[id] = true
    redis.call('HSET', K.ticket .. id, 'started', 1, 'tokens', tokens)
    redis.call('SADD', KEYS[2], id)
    redis.call('ZREM', K.starting, id)
    redis.call('ZADD', K.running, NOW, id)
    count(t, tonumber(t.slots or 1), math.max(held, tonumber(t.blocks or 0)))
  else
    revoked[#revoked + 1] = id
    revoked[#revoked + 1] = int(epoch)
  end
end

for _, id in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  if not listed[id] then
    local t = read_ticket(id)
    if not t or t.state ~= 'placed' or t.worker ~= worker then
      redis.call('SREM', KEYS[2], id)
    elseif t.started == '1' then
      count(t, 0, 0)  -- It has run and is gone; Finish or expiry will end it, its room is free already.
    else
      count(t, tonumber(t.slots or 1), tonumber(t.blocks or 0))
    end
  end
end

local state = {'incarnation', incarnation, 'blocks:0', int(math.floor(ARGV[4] - held_in_all))}  -- Below 0 where leases share blocks.
for class = 0, 3 do
  local c = tostring(class)
  local nobodys = class == 0 and state[4] or 0
  state[#state + 1] = 'slots:' .. c
  state[#state + 1] = int(slots[c] or 0)
  if class > 0 then
    state[#state + 1] = 'blocks:' .. c
    state[#state + 1] = int(blocks[c] or 0)
  else
    state[4] = int(nobodys + (blocks[c] or 0))
  end
end
for field, num_blocks in pairs(of_orgs) do
  state[#state + 1] = field
  state[#state + 1] = int(num_blocks)
end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], unpack(state))
return revoked
