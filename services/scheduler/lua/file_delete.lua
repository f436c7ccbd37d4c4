-- Deletes a file. One that is still coming goes, too: its upload was given up.
-- KEYS: 1 file
-- ARGV: 1 file id, 2 org
-- Output: 'done', or with nothing changed 'none' (there is no such file) or 'used' (a job reads or writes it)
local f = redis.call('HMGET', KEYS[1], 'org', 'state', 'users')
if f[1] ~= ARGV[2] then return 'none' end
if f[2] == 'written' or tonumber(f[3] or 0) > 0 then return 'used' end
drop_file(ARGV[1])
return 'done'
