-- Queues a ticket, or says where it stands. Idempotent by request id: any scheduler may be asked, any number of times.
-- A ticket whose lease is named as lost comes back to its old place, as does one that was withdrawn, dropped or expired.
-- KEYS: 1 ticket
-- ARGV: 1 request id, 2 spec (JSON), 3 queue, 4 line, 5 class, 6 deadline (ms from now), 7 holder, 8 excluded workers (JSON),
--       9 lost epoch, 10 tokens delivered, 11 order if the caller knows it from before, else 0, 12 most tickets waiting for the model,
--       13 scheduler instance, 14.. lines of the model, the least urgent first
-- Output: {'queued', order, ms waited, ms left} | {'placed', lease...} | {'finished'} | {'expired'} |
--         {'full', tickets waiting for the model} | {'shed', the same}
local id, queue, line, lost, known, most = ARGV[1], ARGV[3], ARGV[4], tonumber(ARGV[9]), tonumber(ARGV[11]), tonumber(ARGV[12])
local t = read_ticket(id)

-- Tickets waiting for the model, and whether one more may, if need be because the newest of the least urgent class was put out for it.
local function make_room()
  local lines, depth = {unpack(ARGV, 14)}, 0
  for _, name in ipairs(lines) do depth = depth + tonumber(redis.call('HGET', K.waiting, name) or 0) end
  if depth < most then return depth, true end
  for _, name in ipairs(lines) do
    if name == line then return depth, false end
    local victim, newest = nil, -1
    for _, of_org in ipairs(redis.call('ZRANGE', K.turns .. name, 0, -1)) do
      local last = redis.call('ZRANGE', K.fifo .. of_org, -1, -1, 'WITHSCORES')
      if last[1] and tonumber(last[2]) > newest then victim, newest = last[1], tonumber(last[2]) end
    end
    if victim then
      drop(read_ticket(victim), 'shed')
      publish({event = 'shed', request_id = victim, depth = depth})  -- Heard by all, by the one who asks here too.
      return depth, true
    end
  end
  return depth, false
end

if t and t.state == 'placed' then
  if lost < tonumber(t.epoch) then
    redis.call('HSET', KEYS[1], 'holder', ARGV[7])
    return {'placed', unpack(lease_of(t))}
  end
  -- Refused by a worker that this gateway can reach: it has less room than we think, until its next heartbeat says how much.
  local excluded = false
  for _, worker in ipairs(cjson.decode(ARGV[8])) do excluded = excluded or worker == t.worker end
  if t.started ~= '1' and not excluded and redis.call('HGET', K.worker .. t.worker, 'incarnation') == t.incarnation then
    redis.call('HSET', K.worker .. t.worker, 'refusing', 1)
  end
  end_lease(t, 'lost')
  t.state = 'ended'
elseif t and t.state == 'ended' and t.reason == 'finished' then
  return {'finished'}
elseif t and t.reason == 'shed' and known > 0 then
  return {'shed', most}  -- Its stream has not heard of it.
elseif known == 0 and lost == 0 and (not t or t.reason == 'shed') then
  local depth, fits = make_room()
  if not fits then return {'full', depth} end
end

local order, enqueued, deadline = t and t.order, t and t.enqueued, t and t.deadline
if not order then
  -- Arrival time in microseconds, and always above the last: so order survives a lost Redis and a clock set back.
  order = known > 0 and known or math.max(NOW_US, tonumber(redis.call('GET', K.order) or 0) + 1)
  if known == 0 then redis.call('SET', K.order, int(order)) end
end
enqueued = enqueued or (known > 0 and math.min(NOW, math.floor(known / 1000))) or NOW
deadline = deadline or NOW + tonumber(ARGV[6])
if tonumber(deadline) <= NOW then return {'expired'} end
local epoch = math.max(lost, t and tonumber(t.epoch) or 0)

redis.call('HSET', KEYS[1], 'spec', ARGV[2], 'queue', queue, 'line', line, 'class', ARGV[5], 'deadline', int(deadline), 'holder', ARGV[7],
           'excluded', ARGV[8], 'asked', int(NOW), 'delivered', ARGV[10], 'order', int(order), 'enqueued', int(enqueued), 'epoch', int(epoch), 'started', 0, 'tokens', 0)
if t and t.state == 'queued' then
  redis.call('ZADD', K.held, NOW, id)
else
  enqueue({id = id, queue = queue, line = line, order = order, deadline = deadline})
  publish({event = 'queued', from = ARGV[13]})
end
return {'queued', int(order), NOW - enqueued, deadline - NOW}
