-- Ends a ticket whose Place stream is gone before it heard of a lease. A newer stream for the same ticket keeps it.
-- KEYS: 1 ticket
-- ARGV: 1 request id, 2 holder, 3 reason, 4 scheduler instance
-- Output: 1 if it was withdrawn, else 0
local t = read_ticket(ARGV[1])
if not t or t.holder ~= ARGV[2] then return 0 end

if t.state == 'queued' then
  drop(t, ARGV[3])
elseif t.state == 'placed' and t.started ~= '1' then
  end_lease(t, ARGV[3])
else
  return 0
end
if redis.call('EXISTS', K.queues) == 1 then publish({event = 'room', from = ARGV[4]}) end
return 1
