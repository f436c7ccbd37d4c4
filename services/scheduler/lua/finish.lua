-- Ends a lease by its gateway's word, and settles it; also one that has expired meanwhile. Idempotent; an old epoch changes nothing.
-- KEYS: 1 ticket
-- ARGV: 1 request id, 2 epoch, 3 prompt tokens, 4 output tokens, 5 prompt tokens found in the cache, 6 1 if it failed else 0,
--       7 1 if nothing is to be charged else 0, 8 scheduler instance
-- Output: {1 if this call ended it else 0, line or ''}
local t = read_ticket(ARGV[1])
local late = t and t.state == 'ended' and t.reason == 'expired'  -- Nobody could be told in time; charge and record add only the difference.
if not t or t.state ~= 'placed' and not late or tonumber(t.epoch) ~= tonumber(ARGV[2]) then return {0, ''} end

local used = {prompt = tonumber(ARGV[3]), completion = tonumber(ARGV[4]), cached = tonumber(ARGV[5]), failed = tonumber(ARGV[6]), free = ARGV[7] == '1'}
if late then
  t.late = true
  if t.started ~= '1' then give(t, tonumber(t.given or 0)) end  -- It did start, though no heartbeat got through.
  mark_ended(t, 'finished', used)
else
  end_lease(t, 'finished', used)
end
if t.expected then give(t, ARGV[4] - (t.delivered or 0) - t.expected) end  -- What it was given, not what was expected of it.
redis.call('HSET', KEYS[1], 'tokens', ARGV[4])
if late then return {0, ''} end
if redis.call('EXISTS', K.queues) == 1 then publish({event = 'room', from = ARGV[8]}) end
return {1, t.line or ''}
