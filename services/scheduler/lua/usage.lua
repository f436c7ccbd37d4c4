-- In front of every script: what a request that ends has used, charged to its org and written down once.

local DAY_MS = 86400000
local USAGE_SECONDS = 91 * 86400  -- 90 days back, and the day that has begun
local COUNTERS = {'requests', 'failed', 'prompt', 'completion', 'cached'}

-- The claim that a request with an idempotency key belongs to, and its number there; nil for one without, or whose claim was forgotten.
local function claim_of(t)
  if tonumber(t.epoch or 0) < EPOCHS_PER_TRY then return nil end
  local key = K.claim .. string.sub(t.id, 1, -3)
  if redis.call('EXISTS', key) == 0 then return nil end
  return key, string.sub(t.id, -2)
end

-- All tries of a key come to one record: of each count the most that one of them came to, and failed only if all did.
local function over_all_tries(before, amounts)
  local most = {1, math.min(before[2], amounts[2])}
  for i = 3, #COUNTERS do most[i] = math.max(before[i], amounts[i]) end
  return most
end

-- Counts a request in its org's row of the day. One that ends again, having come back, adds only what it has used since.
local function record(t, org, amounts)
  local f = redis.call('HMGET', K.ticket .. t.id, 'recorded', 'recorded_day')
  local before = f[1] and cjson.decode(f[1]) or {0, 0, 0, 0, 0}
  local day = f[2] or int(math.floor(NOW / DAY_MS))
  local claim, number = claim_of(t)
  local billed = claim and redis.call('HGET', claim, number)
  if billed then
    before, day = unpack(cjson.decode(billed))
    amounts = over_all_tries(before, amounts)
  end
  local row, orgs = K.usage .. day .. ':' .. org, K.users .. day
  for i, counter in ipairs(COUNTERS) do
    if amounts[i] ~= before[i] then redis.call('HINCRBY', row, counter .. ':' .. t.line, int(amounts[i] - before[i])) end
  end
  redis.call('EXPIRE', row, USAGE_SECONDS)
  redis.call('SADD', orgs, org)
  redis.call('EXPIRE', orgs, USAGE_SECONDS)
  redis.call('HSET', K.ticket .. t.id, 'recorded', cjson.encode(amounts), 'recorded_day', day)
  if claim then
    redis.call('HSET', claim, number, cjson.encode({amounts, day}))
    redis.call('PEXPIRE', claim, redis.call('HGET', claim, 'keep'))
  end
end

-- A ticket ends for a reason. `used`: {prompt, completion, cached, failed: 1 or 0, free: whether nothing is charged}, as its gateway says it. Without: what is
-- known of it; nothing if the client has nothing. `t.late`: it had ended for another reason. A lease taken from a worker's word alone is nobody's.
local function settle(t, reason, used)
  if not t.queue then return end
  local _, _, org = unpack(cjson.decode(t.queue))
  local f = redis.call('HMGET', K.ticket .. t.id, 'prompt', 'reserved', 'delivered', 'quota')
  if not used then
    local completion = math.max(tonumber(t.tokens or 0), tonumber(f[3] or 0))
    local free = completion == 0
    used = {prompt = free and 0 or tonumber(f[1] or 0), completion = completion, cached = 0,
            failed = reason == 'withdrawn' and 0 or 1, free = free}
  end
  redis.call('SREM', K.live .. org, t.id)
  local tokens = math.min(used.prompt + used.completion, tonumber(f[2] or 0))
  local debts = read_debts(org)
  for kind, limit in pairs(t.late and f[4] and cjson.decode(f[4]).limits or {}) do  -- Its debt was forgiven, and the bucket's limits forgotten with it.
    if debts[kind].rate == 0 then debts[kind].rate, debts[kind].burst = limit[1], limit[2] end
  end
  charge(t.id, org, debts, {requests = used.free and 0 or 1, tokens = used.free and 0 or tokens})
  record(t, org, {1, used.failed, used.prompt, used.completion, used.cached})
end

-- A ticket that had ended goes on by its worker's word.
local function revive(t)
  if not t.queue then return end
  local _, _, org = unpack(cjson.decode(t.queue))
  redis.call('SADD', K.live .. org, t.id)
end
