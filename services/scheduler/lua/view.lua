-- What the policy decides on: the room of some workers, and the heads of all queues. Reads only.
-- KEYS: 1 queues, 2.. workers
-- ARGV: 1 most heads of each queue, then for each worker its slots in all
-- Output: {workers: {incarnation or '', 1 if it may be used else 0, slots of classes 0..3, blocks of classes 0..3},
--          heads: {request id, spec, order, excluded (JSON), tokens delivered, ms since its Place call}}; no heads if no worker has a free slot
local workers, free = {}, 0
for i = 2, #KEYS do
  local w = redis.call('HMGET', KEYS[i], 'incarnation', 'down', 'refusing', 'slots:0', 'slots:1', 'slots:2', 'slots:3',
                       'blocks:0', 'blocks:1', 'blocks:2', 'blocks:3')
  local usable = w[1] and w[2] ~= '1' and w[3] ~= '1'
  local row = {w[1] or '', usable and 1 or 0}
  for j = 4, 11 do row[#row + 1] = tonumber(w[j] or 0) end
  workers[#workers + 1] = row
  if usable then free = free + math.max(0, tonumber(ARGV[i]) - (row[3] + row[4] + row[5] + row[6])) end
end

local heads = {}
if free > 0 then
  -- More than the free slots, because some heads may have to wait for a certain worker.
  local most = math.min(tonumber(ARGV[1]), free + 8)
  for _, queue in ipairs(redis.call('SMEMBERS', KEYS[1])) do
    for _, id in ipairs(redis.call('ZRANGE', K.fifo .. queue, 0, most - 1)) do
      local f = redis.call('HMGET', K.ticket .. id, 'spec', 'order', 'excluded', 'delivered', 'asked')
      if f[1] then heads[#heads + 1] = {id, f[1], f[2], f[3] or '[]', tonumber(f[4] or 0), NOW - (f[5] or NOW)} end
    end
  end
end
return {workers, heads}
