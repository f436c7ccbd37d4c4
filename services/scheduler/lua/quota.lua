-- In front of every script: what orgs have taken from their buckets, and which of their tickets are alive.
-- A bucket is kept as its debt: 0 is full, and time takes off `rate` of it each minute. Debts count in 1/60000 of a request or token, so that with
-- milliseconds and rates per minute every sum is a whole number below 2^53. A ticket's hash says what the debts hold for it.

local UNITS = 60000
local KINDS = {'requests', 'tokens'}

-- Debts as they are now, with the rate and burst of the last reservation.
local function read_debts(org)
  local f = redis.call('HMGET', K.quota .. org, 'at', 'requests', 'requests_rate', 'requests_burst', 'tokens', 'tokens_rate', 'tokens_burst')
  local passed = math.max(0, NOW - (f[1] or NOW))  -- None while the clock is behind, which the next write makes good.
  local debts = {}
  for i, kind in ipairs(KINDS) do
    local rate = tonumber(f[3 * i] or 0)
    debts[kind] = {units = math.max(0, (f[3 * i - 1] or 0) - passed * rate), rate = rate, burst = tonumber(f[3 * i + 1] or 0)}
  end
  return debts
end

local function ms_to_regain(debt, units)
  return debt.rate > 0 and math.max(0, math.ceil(units / debt.rate)) or 0
end

-- Kept for as long as there is a debt: what is not there is full.
local function write_debts(org, debts)
  local ms = math.max(ms_to_regain(debts.requests, debts.requests.units), ms_to_regain(debts.tokens, debts.tokens.units))
  if ms == 0 then return redis.call('DEL', K.quota .. org) end
  local values = {'at', int(NOW)}
  for _, kind in ipairs(KINDS) do
    local debt = debts[kind]
    for _, value in ipairs({kind, int(debt.units), kind .. '_rate', int(debt.rate), kind .. '_burst', int(debt.burst)}) do values[#values + 1] = value end
  end
  redis.call('HSET', K.quota .. org, unpack(values))
  return redis.call('PEXPIRE', K.quota .. org, int(ms))
end

-- For each kind: what the bucket holds when full (0: no limit), what it holds now, ms until it is full.
local function quota_state(debts)
  local state = {}
  for _, kind in ipairs(KINDS) do
    local debt = debts[kind]
    state[#state + 1] = debt.rate > 0 and debt.burst or 0
    state[#state + 1] = debt.rate > 0 and math.max(0, math.floor((debt.burst * UNITS - debt.units) / UNITS)) or 0
    state[#state + 1] = ms_to_regain(debt, debt.units)
  end
  return state
end

-- Debts under the limits of a policy: {requests: {rate, burst}, tokens: {rate, burst}}. A smaller bucket begins empty at most: what a larger one
-- held would lock the org out.
local function debts_under(org, limits)
  local debts = read_debts(org)
  for _, kind in ipairs(KINDS) do
    local debt, rate, burst = debts[kind], limits[kind][1], limits[kind][2]
    if rate ~= debt.rate or burst ~= debt.burst then
      debts[kind] = {units = rate > 0 and math.min(debt.units, burst * UNITS) or 0, rate = rate, burst = burst}
    end
  end
  return debts
end

-- What the debts hold for a ticket: requests, tokens.
local function charged(id)
  local f = redis.call('HMGET', K.ticket .. id, 'charged_requests', 'charged_tokens')
  return {requests = tonumber(f[1] or 0), tokens = tonumber(f[2] or 0)}
end

local function charge(id, org, debts, wanted)
  local held = charged(id)
  for _, kind in ipairs(KINDS) do
    local debt = debts[kind]
    if debt.rate == 0 then wanted[kind] = 0 end
    debt.units = math.max(0, debt.units + (wanted[kind] - held[kind]) * UNITS)
  end
  write_debts(org, debts)
  redis.call('HSET', K.ticket .. id, 'charged_requests', int(wanted.requests), 'charged_tokens', int(wanted.tokens))
end

-- Takes a request and its tokens for each of some tickets from both buckets, and places among the org's live tickets; or nothing at all. What they hold
-- already isn't taken again. `forced`: they are running or have a place in the queue, so it is taken whatever there is.
-- quota: {live: most tickets or 0, limits: see debts_under}; wants: list of {id, tokens}
-- Returns the state, and unless it was taken: the kinds that stood in the way, and ms until the buckets have enough.
local function reserve(org, quota, wants, forced)
  local debts, live, more, newcomers = debts_under(org, quota.limits), K.live .. org, {requests = 0, tokens = 0}, 0
  for _, want in ipairs(wants) do
    local held = charged(want[1])
    more.requests, more.tokens = more.requests + 1 - held.requests, more.tokens + want[2] - held.tokens
    newcomers = newcomers + 1 - redis.call('SISMEMBER', live, want[1])
  end
  local short, wait = {}, 0
  for _, kind in ipairs(KINDS) do
    local debt = debts[kind]
    local over = debt.units + (more[kind] - debt.burst) * UNITS
    if debt.rate > 0 and more[kind] > 0 and over > 0 then
      short[#short + 1] = kind
      wait = math.max(wait, ms_to_regain(debt, over))
    end
  end
  if quota.live > 0 and newcomers > 0 and redis.call('SCARD', live) + newcomers > quota.live then short[#short + 1] = 'concurrent' end
  if #short > 0 and not forced then
    write_debts(org, debts)
    return quota_state(debts), short, wait
  end
  for _, want in ipairs(wants) do
    charge(want[1], org, debts, {requests = 1, tokens = want[2]})
    redis.call('SADD', live, want[1])
  end
  return quota_state(debts), nil, 0
end

-- Forgets a ticket that was reserved and never queued, and gives back what it took.
local function release(t)
  local org = cjson.decode(t.queue)[3]
  charge(t.id, org, read_debts(org), {requests = 0, tokens = 0})
  redis.call('SREM', K.live .. org, t.id)
  redis.call('ZREM', K.held, t.id)
  redis.call('DEL', K.ticket .. t.id)
end
