-- Queues a ticket and reserves its org's quota, or says where it stands. Idempotent by request id: any scheduler may be asked, any number of times.
-- A ticket whose lease is named as lost comes back to its old place, as does one that was withdrawn, dropped or expired. A new try under an
-- idempotency key names the epoch below all of its own as lost: it takes the ticket over, and a ticket that has ended runs once more.
-- KEYS: 1 ticket
-- ARGV: 1 request id, 2 spec (JSON), 3 queue, 4 line, 5 class, 6 deadline (ms from now), 7 holder, 8 excluded workers (JSON),
--       9 lost epoch, 10 tokens delivered, 11 order if the caller knows it from before, else 0, 12 most tickets waiting for the model,
--       13 scheduler instance, 14 quota (JSON, see reserve; also prompt: tokens in it), 15 dead workers whose word it awaits
--       (JSON: [[worker, incarnation], ...]), 16.. lines of the model, the least urgent first
-- Output: {'queued', quota state, order, ms waited, ms left} | {'placed', quota state, lease...} | {'finished'} | {'expired'} | {'quarantined'} | {'superseded'} |
--         {'full', tickets waiting for the model} | {'shed', the same} | {'over', quota state, kinds, ms until the buckets have enough}
local id, queue, line, lost, known, most = ARGV[1], ARGV[3], ARGV[4], tonumber(ARGV[9]), tonumber(ARGV[11]), tonumber(ARGV[12])
local org, quota = cjson.decode(queue)[3], cjson.decode(ARGV[14])
local t = read_ticket(id)
local try, of_ticket = math.floor(lost / EPOCHS_PER_TRY), math.floor(tonumber(t and t.epoch or 0) / EPOCHS_PER_TRY)
local is_first = lost % EPOCHS_PER_TRY == 0  -- No lease was lost in this try.
local is_new_try = t and try > of_ticket
local runs_again = is_new_try and t.state == 'ended'

-- Tickets waiting for the model, whether one more may, and who is put out for it: the newest of the least urgent class below this one.
local function find_room()
  local lines, depth = {unpack(ARGV, 16)}, 0
  for _, name in ipairs(lines) do depth = depth + tonumber(redis.call('HGET', K.waiting, name) or 0) end
  if depth < most then return depth, true end
  for _, name in ipairs(lines) do
    if name == line then break end
    local victim, newest = nil, -1
    for _, of_org in ipairs(redis.call('ZRANGE', K.turns .. name, 0, -1)) do
      local last = redis.call('ZRANGE', K.fifo .. of_org, -1, -1, 'WITHSCORES')
      if last[1] and tonumber(last[2]) > newest then victim, newest = last[1], tonumber(last[2]) end
    end
    if victim then return depth, true, victim end
  end
  return depth, false
end

local depth, fits, victim
if t and try < of_ticket then
  return {'superseded'}
elseif t and t.state == 'placed' then
  if lost < tonumber(t.epoch) then
    redis.call('HSET', KEYS[1], 'holder', ARGV[7])
    return {'placed', quota_state(debts_under(org, quota.limits)), unpack(lease_of(t))}
  end
  -- Refused by a worker that this gateway can reach: it has less room than we think, until its next heartbeat says how much.
  local excluded = false
  for _, worker in ipairs(cjson.decode(ARGV[8])) do excluded = excluded or worker == t.worker end
  if t.started ~= '1' and not excluded and not is_new_try and redis.call('HGET', K.worker .. t.worker, 'incarnation') == t.incarnation then
    redis.call('HSET', K.worker .. t.worker, 'refusing', 1)
  end
  end_lease(t, 'lost')
  t.state = 'lost'
elseif t and t.state == 'ended' and t.reason == 'finished' and not runs_again then
  return {'finished'}
elseif t and t.state == 'ended' and t.reason == 'quarantined' then
  return {'quarantined'}
elseif t and t.reason == 'shed' and known > 0 then
  return {'shed', most}  -- Its stream has not heard of it.
elseif known == 0 and is_first and (not t or t.state == 'reserved' or t.reason == 'shed' or runs_again) then
  depth, fits, victim = find_room()
  if not fits then
    if t and t.state == 'reserved' then release(t) end
    return {'full', depth}
  end
end

local order, enqueued = t and t.order, t and t.enqueued
if runs_again then order, enqueued = nil, nil end
-- The first call's, but a stream that is here already counts on a clock that nobody sets.
local deadline = tonumber(known == 0 and t and not is_new_try and t.deadline or NOW + ARGV[6])
if deadline <= NOW then
  if t and t.state == 'lost' then mark_ended(t, 'deadline') end
  return {'expired'}
end

if not order then
  -- Arrival time in microseconds, and always above the last: so order survives a lost Redis and a clock set back. Before all else that is written:
  -- a Redis without memory refuses a script's first write or none.
  order = known > 0 and known or math.max(NOW_US, tonumber(redis.call('GET', K.order) or 0) + 1)
  if known == 0 then redis.call('SET', K.order, int(order)) end
end
if runs_again then redis.call('HSET', KEYS[1], 'charged_requests', 0, 'charged_tokens', 0) end  -- It is billed once, but is work again.
local state, short, wait = reserve(org, quota, {{id, quota.tokens}}, not is_first or known > 0 or is_new_try and not runs_again)
if short then return {'over', state, short, wait} end
if victim then
  drop(read_ticket(victim), 'shed')
  publish({event = 'shed', request_id = victim, depth = depth})  -- Heard by all, by the one who asks here too.
end

-- Its org's ceiling has moved since the first call, and with it the class: it goes on in another queue.
if t and t.state == 'queued' and t.queue ~= queue then
  dequeue(t)
  t.state = 'moved'
end

enqueued = enqueued or (known > 0 and math.min(NOW, math.floor(known / 1000))) or NOW
local epoch = math.max(lost, t and tonumber(t.epoch) or 0)

redis.call('HSET', KEYS[1], 'spec', ARGV[2], 'queue', queue, 'line', line, 'class', ARGV[5], 'deadline', int(deadline), 'holder', ARGV[7],
           'excluded', ARGV[8], 'asked', int(NOW), 'delivered', ARGV[10], 'order', int(order), 'enqueued', int(enqueued), 'epoch', int(epoch), 'started', 0, 'tokens', 0,
           'awaits', ARGV[15], 'prompt', int(quota.prompt), 'reserved', int(quota.tokens), 'quota', ARGV[14])
if t and t.state == 'queued' then
  redis.call('ZADD', K.held, NOW, id)
  redis.call('ZADD', K.deadlines, int(deadline), id)
else
  enqueue({id = id, queue = queue, line = line, order = order, deadline = deadline})
  publish({event = 'queued', from = ARGV[13]})
end
return {'queued', state, int(order), NOW - enqueued, deadline - NOW}
