-- Takes out what has been kept for its time, but for files that open jobs read; and says how things stand.
-- KEYS: 1 expiring
-- ARGV: 1 most to take out, 2 ms until a file that is read is looked at again
-- Output: {files, jobs taken out, open jobs, bytes stored}
local files, batches = 0, 0
for _, entry in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', int(NOW), 'LIMIT', 0, ARGV[1])) do
  local kind, id = string.match(entry, '^(%a+):(.*)$')
  if kind == 'file' and tonumber(redis.call('HGET', K.file .. id, 'users') or 0) > 0 then
    redis.call('ZADD', KEYS[1], int(NOW + tonumber(ARGV[2])), entry)
  elseif kind == 'file' then
    drop_file(id)
    files = files + 1
  else
    redis.call('ZREM', K.batches .. (redis.call('HGET', K.batch .. id, 'org') or ''), id)
    redis.call('UNLINK', K.batch .. id, K.ended .. id)
    redis.call('ZREM', KEYS[1], entry)
    batches = batches + 1
  end
end
local _, bytes = stored_bytes('')
return {files, batches, redis.call('ZCARD', K.ready), bytes}
