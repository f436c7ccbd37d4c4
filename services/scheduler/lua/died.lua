-- A worker has died, and this is what its last step held. A request that died at the same output position before is what workers die of: it ends.
-- KEYS: none
-- ARGV: request id, epoch and output tokens of each, in turn
-- Output: list of {request id, line} that are quarantined by this call
local quarantined = {}
for i = 1, #ARGV, 3 do
  local id, epoch, position = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local t = read_ticket(id)
  local key = K.ticket .. id
  -- Each epoch counts once: the worker tells every scheduler.
  local over = t and t.state == 'ended' and (t.reason == 'finished' or t.reason == 'quarantined')
  if t and not over and redis.call('HSETNX', key, 'death:' .. epoch, position) == 1 then
    if redis.call('HINCRBY', key, 'deaths:' .. position, 1) >= 2 then
      if t.state == 'queued' then
        drop(t, 'quarantined')
      elseif t.state == 'placed' then
        end_lease(t, 'quarantined')
      else
        redis.call('HSET', key, 'reason', 'quarantined')
      end
      quarantined[#quarantined + 1] = {id, t.line or ''}
    end
  end
end
return quarantined
