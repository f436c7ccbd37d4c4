-- Keeps the tickets of living Place streams, and says what their streams don't know yet.
-- KEYS: none
-- ARGV: request id and holder of each, in turn
-- Output: list of {'placed', lease...}, {'missing', request id} or {'superseded', request id}; nothing for those still queued
local news = {}
for i = 1, #ARGV, 2 do
  local id, holder = ARGV[i], ARGV[i + 1]
  local t = read_ticket(id)
  if t and t.holder and t.holder ~= holder then
    news[#news + 1] = {'superseded', id}
  elseif not t or t.state == 'ended' then
    news[#news + 1] = {'missing', id}
  elseif t.state == 'placed' then
    news[#news + 1] = {'placed', unpack(lease_of(t))}
  else
    redis.call('ZADD', K.held, NOW, id)
  end
end
return news
