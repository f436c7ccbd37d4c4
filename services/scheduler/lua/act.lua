-- An operator's act: sets a field of a hash, or takes it out, and writes the act down; both or neither. Other schedulers are told.
-- KEYS: 1 hash, 2 audit
-- ARGV: 1 field, 2 its value, or '' to take it out, 3 audit entry, 4 most fields in the hash, 5 most audit entries, 6 scheduler instance,
--       7 what the field holds as far as the operator's scheduler knows; left out: anything
-- Output: 'done', now or when this very entry came first; or with nothing changed 'none' (there is nothing to take out), 'full' or 'changed' (by somebody else just now)
-- Sent again, as its answer was lost.
for _, entry in ipairs(redis.call('LRANGE', KEYS[2], 0, 99)) do
  if entry == ARGV[3] then return 'done' end
end
local now = redis.call('HGET', KEYS[1], ARGV[1])
local exists = now ~= false
if ARGV[7] and ARGV[7] ~= (now or '') and ARGV[2] ~= (now or '') then return 'changed' end
if ARGV[2] == '' then
  if not exists then return 'none' end
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  if not exists and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[4]) then return 'full' end
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
end
redis.call('LPUSH', KEYS[2], ARGV[3])
redis.call('LTRIM', KEYS[2], 0, ARGV[5] - 1)
if KEYS[1] == K.orgs or KEYS[1] == K.drained or KEYS[1] == K.pins then publish({event = 'orgs', from = ARGV[6]}) end
return 'done'
