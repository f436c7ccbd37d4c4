-- Ends a lease by its gateway's word. Idempotent; an old epoch changes nothing.
-- KEYS: 1 ticket
-- ARGV: 1 request id, 2 epoch, 3 output tokens, 4 scheduler instance
-- Output: {1 if this call ended it else 0, line or ''}
local t = read_ticket(ARGV[1])
local epoch = tonumber(ARGV[2])
if not t or t.state ~= 'placed' or tonumber(t.epoch) ~= epoch then return {0, ''} end

end_lease(t, 'finished')
if t.expected then give(t, ARGV[3] - (t.delivered or 0) - t.expected) end  -- What it was given, not what was expected of it.
redis.call('HSET', KEYS[1], 'tokens', ARGV[3])
if redis.call('EXISTS', K.queues) == 1 then publish({event = 'room', from = ARGV[4]}) end
return {1, t.line or ''}
