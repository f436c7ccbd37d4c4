-- In front of every script, first: the time, Redis's own, and whole numbers.

local function now_us()
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end

local NOW_US = now_us()
local NOW = math.floor(NOW_US / 1000)

local function int(x)
  return string.format('%.0f', tonumber(x) or 0)
end
