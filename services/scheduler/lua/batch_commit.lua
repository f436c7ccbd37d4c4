-- Writes a line's result down: the first counts. The last result ends the job.
-- KEYS: 1 lines to do, 2 lines taken, 3 ended lines
-- ARGV: 1 job id, 2 line, 3 epoch, 4 result, 5 1 for an error
-- Output: 1 if the result counts (sent again: still 1), 0 if not
local b = read_batch(ARGV[1])
if not b then return 0 end
local line, text, failed = ARGV[2], ARGV[4], ARGV[5] == '1'
local known = redis.call('HGET', K.results .. b.output, line) or redis.call('HGET', K.results .. b.error, line)
if known then return known == text and 1 or 0 end
if OVER[b.status] or not holds(b.id, line, ARGV[3]) then return 0 end
local file = failed and b.error or b.output
if redis.call('EXISTS', K.file .. file) == 0 then
  redis.call('HSET', K.file .. file, 'org', b.org, 'state', 'written', 'name', b.id .. (failed and '_error' or '_output') .. '.jsonl',
             'purpose', 'batch_output', 'bytes', 0, 'created', int(NOW), 'users', 0, 'total', b.total)
end
redis.call('ZREM', KEYS[1], line)
redis.call('ZREM', KEYS[2], line)
redis.call('HSET', K.results .. file, line, text)
redis.call('HINCRBY', K.file .. file, 'bytes', #text)
count_bytes(b.org, #text)
redis.call('RPUSH', KEYS[3], failed and -1 - tonumber(line) or line)
redis.call('HINCRBY', K.batch .. b.id, failed and 'failed' or 'completed', 1)
conclude(b)
return 1
