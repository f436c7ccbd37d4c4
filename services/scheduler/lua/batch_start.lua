-- Takes what came of checking a job's lines.
-- KEYS: 1 lines to do
-- ARGV: 1 job id, 2 epoch of the check, 3 number of lines, 4 errors (JSON), or '' for none
-- Output: 1, or with nothing changed 0 (another has checked it since, or it was cancelled)
local b = read_batch(ARGV[1])
if not b or b.status ~= 'validating' or b.checks ~= ARGV[2] then return 0 end
redis.call('HSET', K.batch .. b.id, 'total', ARGV[3])
if ARGV[4] ~= '' then
  redis.call('HSET', K.batch .. b.id, 'errors', ARGV[4])
  close_batch(b, 'failed')
  return 1
end
local total, at_once = tonumber(ARGV[3]), 1000
for first = 0, total - 1, at_once do
  local entries = {}
  for line = first, math.min(first + at_once, total) - 1 do  -- their first turn is in the file's order
    entries[#entries + 1] = line
    entries[#entries + 1] = line
  end
  redis.call('ZADD', KEYS[1], unpack(entries))
end
set_status(b, 'in_progress')
redis.call('ZADD', K.ready, int(NOW), b.id)
conclude(b)
return 1
