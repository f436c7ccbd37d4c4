-- Gives a line back, to be taken again later.
-- KEYS: 1 lines to do, 2 lines taken, 3 strikes
-- ARGV: 1 job id, 2 line, 3 epoch, 4 ms until then, 5 ms in which no other line of the job is taken, 6 1 if it failed on our side
-- Output: 1, or with nothing changed 0 (it is another's, or was given back already)
local b, line = read_batch(ARGV[1]), ARGV[2]
if not b or not redis.call('ZSCORE', KEYS[2], line) or not holds(b.id, line, ARGV[3]) then return 0 end
local at = NOW + tonumber(ARGV[4])
redis.call('ZREM', KEYS[2], line)
redis.call('ZADD', KEYS[1], int(at), line)
if ARGV[6] == '1' then redis.call('HINCRBY', KEYS[3], line, 1) end
if tonumber(ARGV[5]) > 0 then
  redis.call('HSET', K.batch .. b.id, 'paused', int(math.max(tonumber(b.paused or 0), NOW + tonumber(ARGV[5]))))
end
ready_at(b.id, VERDICTS[b.status] and NOW or at)
return 1
