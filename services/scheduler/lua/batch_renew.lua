-- Says that lines of one job are still worked on; line -1: that it is still being checked. One that is to end instead is taken away.
-- KEYS: 1 lines to do, 2 lines taken
-- ARGV: 1 job id, 2 ms of a lease; then line and epoch of each
-- Output: list of the lines that are lost
local b, lost = read_batch(ARGV[1]), {}
local at = int(NOW + tonumber(ARGV[2]))
local function renew(line, epoch)
  if not b then return false end
  if line == '-1' then
    if b.status ~= 'validating' or b.checks ~= epoch then return false end
    redis.call('ZADD', K.ready, at, b.id)
    return true
  end
  if not holds(b.id, line, epoch) then return false end
  local stays = b.status == 'in_progress' and NOW < tonumber(b.expires)
  redis.call('ZREM', stays and KEYS[1] or KEYS[2], line)
  redis.call('ZADD', stays and KEYS[2] or KEYS[1], stays and at or line, line)
  if not stays then ready_at(b.id, NOW) end
  return stays
end
for i = 3, #ARGV, 2 do
  if not renew(ARGV[i], ARGV[i + 1]) then lost[#lost + 1] = tonumber(ARGV[i]) end
end
return lost
