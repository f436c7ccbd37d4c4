-- What the policy decides on: the room of some workers, whose turn it is, and the first tickets of all queues. Reads only.
-- KEYS: 1 waiting, 2.. workers
-- ARGV: 1 most tickets of each queue, 2 1 if a class may take the room of lower ones, then for each worker its slots in all
-- Output: {workers: {incarnation or '', 1 if it may be used else 0, slots of classes 0..3, blocks of classes 0..3, org, its blocks, ...},
--          queues (JSON): {tokens served, 1 if more wait behind, {request id, spec, order, excluded (JSON), tokens delivered,
--                   ms since its Place call, ms since its arrival}...}, none of a class for which no worker has a free slot,
--          tokens placed lately (JSON): {model, of classes 1..3}}
local workers, free = {}, {0, 0, 0}
for i = 2, #KEYS do
  local flat, w, orgs = redis.call('HGETALL', KEYS[i]), {}, {}
  for j = 1, #flat, 2 do
    if string.sub(flat[j], 1, 4) == 'org:' then
      orgs[#orgs + 1] = string.sub(flat[j], 5)
      orgs[#orgs + 1] = tonumber(flat[j + 1])
    else
      w[flat[j]] = flat[j + 1]
    end
  end
  local usable = w.incarnation and w.down ~= '1' and w.refusing ~= '1'
  local row, used = {w.incarnation or '', usable and 1 or 0}, 0
  for class = 0, 3 do row[3 + class] = tonumber(w['slots:' .. class] or 0) end
  for class = 0, 3 do row[7 + class] = tonumber(w['blocks:' .. class] or 0) end
  for class = 1, 3 do
    local counted = ARGV[2] == '1' and class or 3
    local left = tonumber(ARGV[i + 1])
    for c = 0, counted do left = left - row[3 + c] end
    if usable then free[class] = free[class] + math.max(0, left) end
  end
  for _, value in ipairs(orgs) do row[#row + 1] = value end
  workers[#workers + 1] = row
end

-- The first tickets of a queue whose deadline hasn't passed, and whether there are more.
local function heads(queue, most)
  local found, start = {}, 0
  repeat
    local ids = redis.call('ZRANGE', K.fifo .. queue, start, start + most)
    for _, id in ipairs(ids) do
      local f = redis.call('HMGET', K.ticket .. id, 'spec', 'order', 'excluded', 'delivered', 'asked', 'enqueued', 'deadline')
      if f[1] and tonumber(f[7] or NOW) > NOW then
        if #found == most then return found, 1 end
        found[#found + 1] = {id, f[1], f[2], f[3] or '[]', tonumber(f[4] or 0), NOW - (f[5] or NOW), NOW - (f[6] or NOW)}
      end
    end
    start = start + most + 1
  until #ids <= most
  return found, 0
end

local queues, placed, models = {}, {}, {}
for _, line in ipairs(redis.call('HKEYS', KEYS[1])) do
  local model, class = parts_of(line)
  if free[class] > 0 then
    local turns = redis.call('ZRANGE', K.turns .. line, 0, -1, 'WITHSCORES')
    -- More than the free slots, because some may have to wait for a certain worker. What is left out has its turn in the next round.
    local most = math.min(tonumber(ARGV[1]), math.ceil((free[class] + 8) / math.max(1, #turns / 2)))
    for i = 1, #turns, 2 do
      local found, cut = heads(turns[i], most)
      if found[1] then queues[#queues + 1] = {turns[i + 1], cut, unpack(found)} end
    end
    if not models[model] then
      models[model] = true
      placed[#placed + 1] = {model, unpack(recent_tokens(K.recent .. model))}
    end
  end
end
return {workers, cjson.encode(queues), cjson.encode(placed)}
