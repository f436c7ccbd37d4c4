-- In front of every script: the ticket's moves between states, and the room of workers.
-- A ticket is queued -> placed -> ended, and may come back to queued at its old order from either.

local ENDED_SECONDS = 300  -- how long an ended ticket is remembered: for idempotence, and to come back at its old place

local function publish(event)
  redis.call('PUBLISH', K.events, cjson.encode(event))
end

local FIELDS = {'state', 'epoch', 'order', 'enqueued', 'deadline', 'holder', 'queue', 'line', 'class', 'worker', 'incarnation',
                'address', 'slots', 'blocks', 'counted_slots', 'counted_blocks', 'started', 'reason', 'tokens', 'placed',
                'delivered', 'given', 'expected', 'weight', 'decision', 'awaits', 'asked'}

-- The ticket's fields by name, or nil if there is no such ticket. Numbers are still strings.
local function read_ticket(id)
  local values = redis.call('HMGET', K.ticket .. id, unpack(FIELDS))
  if not values[1] then return nil end
  local ticket = {id = id}
  for i, name in ipairs(FIELDS) do ticket[name] = values[i] or nil end
  return ticket
end

-- Model, class and org of a queue's or line's name.
local function parts_of(queue)
  local parts = cjson.decode(queue)
  return parts[1], parts[2], parts[3]
end

-- What a lease says to its gateway, flat.
local function lease_of(t)
  return {t.id, tonumber(t.epoch), t.worker, t.incarnation, t.address or '', math.max(0, tonumber(t.placed or 0) - tonumber(t.enqueued or 0)),
          t.decision or ''}
end

-- A worker's field that counts the blocks of an org's leases.
local function org_field(t)
  return 'org:' .. select(3, parts_of(t.queue))
end

-- Adds to (or takes from) what is counted as used on the worker of this lease, if that worker is still the same incarnation.
local function count_room(t, slots, blocks)
  local key = K.worker .. (t.worker or '')
  if redis.call('HGET', key, 'incarnation') ~= t.incarnation then return end
  local class = t.class or '0'
  if slots ~= 0 then redis.call('HINCRBY', key, 'slots:' .. class, slots) end
  if blocks ~= 0 then redis.call('HINCRBY', key, 'blocks:' .. class, blocks) end
  if blocks ~= 0 and t.queue then redis.call('HINCRBY', key, org_field(t), blocks) end
end

local function enqueue(t)
  redis.call('PERSIST', K.ticket .. t.id)
  redis.call('HSET', K.ticket .. t.id, 'state', 'queued')
  redis.call('HDEL', K.ticket .. t.id, 'reason')
  redis.call('ZADD', K.fifo .. t.queue, int(t.order), t.id)
  redis.call('SADD', K.queues, t.queue)
  redis.call('HINCRBY', K.waiting, t.line, 1)
  redis.call('ZADD', K.held, NOW, t.id)
  redis.call('ZADD', K.deadlines, int(t.deadline), t.id)
  take_turn(t)
end

local function dequeue(t)
  redis.call('ZREM', K.fifo .. t.queue, t.id)
  if redis.call('EXISTS', K.fifo .. t.queue) == 0 then
    redis.call('SREM', K.queues, t.queue)
    leave_turn(t)
  end
  if redis.call('HINCRBY', K.waiting, t.line, -1) <= 0 then redis.call('HDEL', K.waiting, t.line) end
  redis.call('ZREM', K.held, t.id)
  redis.call('ZREM', K.deadlines, t.id)
end

-- `used`: see settle. A lost lease settles nothing: its ticket is queued again at once.
local function mark_ended(t, reason, used)
  redis.call('HSET', K.ticket .. t.id, 'state', 'ended', 'reason', reason)
  redis.call('EXPIRE', K.ticket .. t.id, ENDED_SECONDS)
  if reason ~= 'lost' then settle(t, reason, used) end
end

-- Ends a queued ticket.
local function drop(t, reason)
  dequeue(t)
  mark_ended(t, reason)
end

-- Ends a placed ticket's lease and gives its room back. What never started was not given.
local function end_lease(t, reason, used)
  if t.started ~= '1' and reason ~= 'finished' then give(t, -tonumber(t.given or 0)) end
  count_room(t, -tonumber(t.counted_slots or 0), -tonumber(t.counted_blocks or 0))
  redis.call('SREM', K.leases .. (t.worker or ''), t.id)
  redis.call('ZREM', K.starting, t.id)
  redis.call('ZREM', K.running, t.id)
  redis.call('HSET', K.ticket .. t.id, 'counted_slots', 0, 'counted_blocks', 0)
  mark_ended(t, reason, used)
end

