-- Keeps what explains an ended request, for an hour and while there is room: the oldest make place for the newest. The first word stands.
-- KEYS: 1 the record, 2 what is kept, 3 its bytes
-- ARGV: 1 request id, 2 record, 3 seconds that it is kept, 4 most records, 5 most bytes
-- Output: 1 if it was kept, 0 if there was one
local MOST_PER_CALL = 64  -- Redis does nothing else meanwhile; what is over the bounds then goes with the next calls.
local seconds = tonumber(ARGV[3])
if not redis.call('SET', KEYS[1], ARGV[2], 'NX', 'EX', seconds) then return 0 end
local num = redis.call('LPUSH', KEYS[2], cjson.encode({ARGV[1], #ARGV[2], NOW}))
local bytes = redis.call('INCRBY', KEYS[3], #ARGV[2])
redis.call('EXPIRE', KEYS[2], seconds)
redis.call('EXPIRE', KEYS[3], seconds)
for _ = 1, MOST_PER_CALL do
  local last = redis.call('LINDEX', KEYS[2], -1)
  if not last then break end
  local id, size, at = unpack(cjson.decode(last))
  if num <= tonumber(ARGV[4]) and bytes <= tonumber(ARGV[5]) and NOW - at < seconds * 1000 then break end
  redis.call('RPOP', KEYS[2])
  redis.call('DEL', K.explanation .. id)
  num, bytes = num - 1, redis.call('DECRBY', KEYS[3], size)
end
return 1
