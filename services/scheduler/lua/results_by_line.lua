-- Reads a piece of a job's output or error file, by line.
-- KEYS: 1 results
-- ARGV: 1 the line to begin at, 2 lines of the job, 3 bytes from which a piece is enough, 4 most lines to look at
-- Output: {the line to go on at, or 0 at the end; results...}
local from, total = tonumber(ARGV[1]), tonumber(ARGV[2])
local piece, size, line = {0}, 0, from
while line < total and line < from + tonumber(ARGV[4]) and size < tonumber(ARGV[3]) do
  local text = redis.call('HGET', KEYS[1], int(line))
  if text then
    piece[#piece + 1] = text
    size = size + #text
  end
  line = line + 1
end
if line < total then piece[1] = line end
return piece
