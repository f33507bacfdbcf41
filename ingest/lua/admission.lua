-- Put before scripts that accept requests (after waiting.lua): whether one may wait.
-- The rules are those of engine/acceptance.py, with the outlooks of all engines that live added up.

local BENEFIT_OF_DOUBT = 4 / 3 -- a start that is forecast is taken to come sooner by this factor
local GRACE_S = 0.5 -- and by this
local RETRY_MS = 1000 -- while nothing is known
local MIN_RETRY_MS, MAX_RETRY_MS = 100, 600000

local function refusal(code, message, retry_ms, param)
  retry_ms = math.floor(math.min(math.max(retry_ms, MIN_RETRY_MS), MAX_RETRY_MS))
  return '{"code":"' .. code .. '","message":' .. cjson.encode(message) .. (param and ',"param":"' .. param .. '"' or '')
    .. ',"retry_after_ms":' .. string.format('%d', retry_ms) .. '}'
end

-- An outlook that can be calculated with, or nil: an engine may be of another kind, or have no numbers yet.
local function checked(outlook)
  if type(outlook) ~= 'table' or type(outlook.times) ~= 'table' or type(outlook.admitted) ~= 'table' then return nil end
  if #outlook.times < 2 or #outlook.times ~= #outlook.admitted or type(outlook.mean_tokens) ~= 'number' then return nil end
  for i = 1, #outlook.times do
    if type(outlook.times[i]) ~= 'number' or type(outlook.admitted[i]) ~= 'number' then return nil end
  end
  return outlook
end

-- What the engines with a fresh heartbeat have said of themselves; `age`: seconds since then, `leaving`: what waits now
-- waits for the others.
local function live_engines(base, now, timeout_ms)
  local engines = {}
  local beats = redis.call('ZRANGEBYSCORE', base .. 'hb', now - timeout_ms, '+inf', 'WITHSCORES')
  for i = 1, #beats, 2 do
    local text = redis.call('HGET', base .. 'engines', beats[i])
    local read, engine = pcall(cjson.decode, text or '')
    if not read or type(engine) ~= 'table' then engine = {} end
    engine.age = math.max(0, now - tonumber(beats[i + 1])) / 1000
    engine.outlook = checked(engine.outlook)
    engine.waiting_requests = tonumber(engine.waiting_requests) or 0
    engine.waiting_tokens = tonumber(engine.waiting_tokens) or 0
    engines[#engines + 1] = engine
  end
  return engines
end

-- Waiting requests of one engine's mean size that it will have admitted in t seconds.
local function admitted_by(engine, t)
  local times, admitted = engine.outlook.times, engine.outlook.admitted
  t = t + engine.age
  local last = #times
  if t >= times[last] then
    -- Beyond its horizon it goes on as in the second half of it.
    local half = math.ceil(last / 2)
    local span = times[last] - times[half]
    local rate = span > 0 and (admitted[last] - admitted[half]) / span or 0
    return admitted[last] + rate * (t - times[last])
  end
  local i = 1
  while times[i + 1] <= t do
    i = i + 1
    if i == last then return admitted[last] end
  end
  if t < times[1] then return 0 end
  local span = times[i + 1] - times[i]
  return admitted[i] + (span > 0 and (t - times[i]) / span or 1) * (admitted[i + 1] - admitted[i])
end

-- {mean prompt, requests and tokens that wait inside the engines}, or nil where an engine cannot tell.
local function outlook_of(engines)
  local sum, requests, tokens = 0, 0, 0
  for _, engine in ipairs(engines) do
    if not engine.outlook then return nil end
    sum = sum + engine.outlook.mean_tokens
    requests, tokens = requests + engine.waiting_requests, tokens + engine.waiting_tokens
  end
  if #engines == 0 then return nil end
  return {mean = math.max(1, sum / #engines), requests = requests, tokens = tokens}
end

-- Seconds until the engines together will have admitted so many requests of mean size.
local function time_of(engines, needed)
  local function reached(t)
    local sum = 0
    for _, engine in ipairs(engines) do sum = sum + admitted_by(engine, t) end
    return sum >= needed
  end
  local low, high = 0, 1
  while not reached(high) do
    if high > 1000000 then return high end
    low, high = high, high * 2
  end
  for _ = 1, 20 do
    local middle = (low + high) / 2
    if reached(middle) then high = middle else low = middle end
  end
  return high
end

-- The smallest of the values that are numbers; nil where there is none.
local function least(...)
  local found
  for i = 1, select('#', ...) do
    local value = tonumber((select(i, ...)))
    if value and (not found or value < found) then found = value end
  end
  return found
end

-- Whether a request may wait: nil, or the error as JSON. `caps`: requests, prompt tokens, the same for one tenant, or ''
-- for no cap; each engine may say smaller ones. `left_ms`: until its deadline. `is_last`: it comes after everything in
-- the streams, so raw entries that nobody has looked at yet are before it.
local function refuse(base, group, now, stream, tenant, tokens, left_ms, timeout_ms, needs_engine, caps, is_last)
  if needs_engine and redis.call('ZCOUNT', base .. 'hb', now - timeout_ms, '+inf') == 0 then
    return refusal('no_engine', 'no engine serves this queue now', math.max(timeout_ms, RETRY_MS))
  end
  local fields = redis.call('HMGET', base .. 'load', 'n0', 'n1', 'n2', 't0', 't1', 't2', 'n@' .. tenant, 't@' .. tenant)
  for i = 1, 8 do fields[i] = tonumber(fields[i] or 0) end
  local waiting, waiting_tokens = 0, fields[4] + fields[5] + fields[6]
  local ahead, ahead_tokens = 0, 0
  for priority = 0, 2 do
    local requests = fields[priority + 1]
    if is_last then
      local key = base .. 'in:' .. priority
      requests = math.max(requests, redis.call('XLEN', key) - (ask('XPENDING', key, group)[1] or 0))
    end
    waiting = waiting + requests
    if priority <= stream then
      ahead, ahead_tokens = ahead + requests, ahead_tokens + fields[priority + 4]
    end
  end
  if waiting == 0 then return nil end

  local engines = {}
  local inside, inside_tokens, places, token_places = 0, 0, 0, 0
  for _, engine in ipairs(live_engines(base, now, timeout_ms)) do
    local own = type(engine.caps) == 'table' and engine.caps or {}
    for i, name in ipairs({'requests', 'prompt_tokens', 'tenant_requests', 'tenant_prompt_tokens'}) do
      caps[i] = least(caps[i], own[name]) or ''
    end
    if engine.leaving ~= true then
      engines[#engines + 1] = engine
      inside = inside + engine.waiting_requests
      inside_tokens = inside_tokens + engine.waiting_tokens
      places = places and tonumber(own.places) and places + own.places
      token_places = token_places and tonumber(own.token_places) and token_places + own.token_places
    end
  end
  -- What the engines themselves allow to wait for them, inside and here.
  if #engines == 0 then places, token_places = nil, nil end
  local outlook = outlook_of(engines)

  local function full(message, requests_over, tokens_over)
    local retry_ms = RETRY_MS
    if outlook then
      local excess = math.max(requests_over, tokens_over / outlook.mean)
      retry_ms = time_of(engines, math.max(outlook.requests, outlook.tokens / outlook.mean) + excess) * 1000
    end
    return refusal('queue_full', message, retry_ms)
  end
  local checks = {
    {waiting, 1, tonumber(caps[1]), 'requests wait, max_queued_requests is'},
    {waiting + inside, 1, places or nil, 'requests wait, max_waiting_requests of all engines is'},
    {fields[7], 1, tonumber(caps[3]), 'requests of the tenant wait, max_tenant_queued_requests is'},
    {waiting_tokens, tokens, tonumber(caps[2]), 'prompt tokens wait, max_queued_prompt_tokens is'},
    {waiting_tokens + inside_tokens, tokens, token_places or nil,
      'prompt tokens wait, max_waiting_prompt_tokens of all engines is'},
    {fields[8], tokens, tonumber(caps[4]), 'prompt tokens of the tenant wait, max_tenant_queued_prompt_tokens is'},
  }
  for i, check in ipairs(checks) do
    local held, more, cap = check[1], check[2], check[3]
    -- An empty queue takes any one request, however long.
    if cap and held > 0 and held + more > cap then
      local over = held + more - cap
      local message = string.format('%d %s %d', held, check[4], cap)
      if i > 3 then message = message .. string.format('; this request has about %d', more) end
      return full(message, i > 3 and 0 or over, i > 3 and over or 0)
    end
  end

  if not outlook then return nil end
  local needed = math.max(ahead + outlook.requests, (ahead_tokens + outlook.tokens) / outlook.mean)
    + tokens / outlook.mean
  local left_s = left_ms / 1000
  local sum = 0
  for _, engine in ipairs(engines) do sum = sum + admitted_by(engine, (left_s + GRACE_S) * BENEFIT_OF_DOUBT) end
  if sum >= needed then return nil end
  local start_s = time_of(engines, needed) / BENEFIT_OF_DOUBT - GRACE_S
  return refusal('deadline_unreachable', string.format(
    'the request would start in %.1f s at the earliest, its deadline is in %.1f s; %d requests wait',
    start_s, math.max(0, left_s), ahead), (start_s - left_s) * 1000, 'ttl_ms')
end
