-- Asks a job to end. Asked again, it stays as it is.
-- KEYS: 1 job
-- ARGV: 1 job id, 2 org
-- Output: 'done', or with nothing changed 'none' (there is no such job) or its status, which is over
local b = read_batch(ARGV[1])
if not b or b.org ~= ARGV[2] then return 'none' end
if OVER[b.status] and b.status ~= 'cancelled' then return b.status end
if b.status == 'validating' then
  set_status(b, 'cancelling')
  close_batch(b, 'cancelled')
elseif b.status == 'in_progress' or b.status == 'finalizing' then
  set_status(b, 'cancelling')
  redis.call('ZADD', K.ready, int(NOW), b.id)
end
return 'done'
