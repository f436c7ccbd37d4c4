-- In front of every script: whose turn it is among the orgs of a line, and what each class was placed lately.
-- An org's count is the tokens that it was given in the line, divided by its weight. Its zset `turns` has those that wait, `spent` the others.

local IDLE_SECONDS = 3600  -- how long the counts of orgs that don't wait are remembered after the last of them left
local MOST_IDLE = 10000  -- of one line; those that were given least are forgotten first, as they would be lifted anyway
local RECENT_MS = 10000  -- over which the classes' shares are counted

local function real(x)
  return string.format('%.17g', x)
end

-- An org that begins to wait in a line goes on from the tokens it was given there, but not from fewer than any that waits already:
-- the time in which it asked for nothing is no claim on the time of others.
local function take_turn(t)
  if redis.call('ZSCORE', K.turns .. t.line, t.queue) then return end
  local least = redis.call('ZRANGE', K.turns .. t.line, 0, 0, 'WITHSCORES')[2] or redis.call('GET', K.clock .. t.line) or 0
  local own = redis.call('ZSCORE', K.spent .. t.line, t.queue) or 0
  redis.call('ZADD', K.turns .. t.line, real(math.max(least, own)), t.queue)
  redis.call('ZREM', K.spent .. t.line, t.queue)
end

local function leave_turn(t)
  local served = redis.call('ZSCORE', K.turns .. t.line, t.queue)
  if not served then return end
  redis.call('ZREM', K.turns .. t.line, t.queue)
  redis.call('ZADD', K.spent .. t.line, served, t.queue)
  redis.call('ZREMRANGEBYRANK', K.spent .. t.line, 0, -MOST_IDLE - 1)
  redis.call('EXPIRE', K.spent .. t.line, IDLE_SECONDS)
  redis.call('SET', K.clock .. t.line, served, 'EX', IDLE_SECONDS)
end

-- Adds to (or takes from) the tokens that the ticket's org was given in its line.
local function give(t, tokens)
  for _, stem in ipairs({K.turns, K.spent}) do
    if t.line and redis.call('ZSCORE', stem .. t.line, t.queue) then
      redis.call('ZINCRBY', stem .. t.line, real(tokens / tonumber(t.weight or 1)), t.queue)
      return
    end
  end
end

-- Tokens placed of late of a model, by class 1..3, as of now.
local function recent_tokens(key)
  local h = redis.call('HMGET', key, 'at', '1', '2', '3')
  local left = h[1] and math.exp(math.min(0, tonumber(h[1]) - NOW) / RECENT_MS) or 0
  return {left * (h[2] or 0), left * (h[3] or 0), left * (h[4] or 0)}
end
