-- Reads a job's results in the order in which they came. Those whose file was deleted are left out.
-- KEYS: 1 ended lines, 2 results of the output file, 3 of the error file
-- ARGV: 1 how many have been read, 2 bytes from which a piece is enough, 3 most results
-- Output: {how many have been read now; line, 1 for an error, text, ...}
local from = tonumber(ARGV[1])
local piece, size, num = {from}, 0, 0
for _, entry in ipairs(redis.call('LRANGE', KEYS[1], from, from + ARGV[3] - 1)) do
  if size >= tonumber(ARGV[2]) then break end
  local line, failed = tonumber(entry), 0
  if line < 0 then line, failed = -1 - line, 1 end
  local text = redis.call('HGET', KEYS[2 + failed], int(line))
  if text then
    for _, part in ipairs({line, failed, text}) do piece[#piece + 1] = part end
    size = size + #text
  end
  num = num + 1
end
piece[1] = from + num
return piece
