-- Ending requests that have not begun without an engine's help.

-- The answer of a request that ends without an engine's help: its only event, and its record from now on.
local function answer(base, id, state, problem, now, result_ttl, replay_ttl, attempt, created)
  local ms = string.format('%d', now - created)
  local usage = '{"prompt_tokens":0,"completion_tokens":0,"cached_tokens":0}'
  local metrics = '{"queue_ms":' .. ms .. ',"total_ms":' .. ms .. ',"attempts":' .. attempt .. '}'
  local done = '{"seq":1,"attempt":' .. attempt .. ',"type":"done","state":"' .. state .. '","usage":' .. usage
    .. ',"metrics":' .. metrics .. ',"error":' .. problem .. '}'
  local record, events = base .. 'req:' .. id, base .. 'ev:' .. id
  redis.call('UNLINK', events) -- of an earlier request, whose record is gone
  redis.call('XADD', events, '1-0', 'e', done)
  redis.call(PUBLISH, base .. 'ch:' .. id, '1 ' .. done)
  redis.call('HSET', record, 'state', state, 'seq', 1, 'finished', now, 'result', '[]', 'usage', usage,
    'metrics', metrics, 'error', problem)
  redis.call('PEXPIRE', record, result_ttl)
  redis.call('PEXPIRE', events, replay_ttl)
  publish_end(base, id, 1)
  redis.call('HINCRBY', base .. 'stat', state, 1)
  local callback = redis.call('HGET', record, 'callback')
  if not callback then return end
  put_hook(base, id, string.format('%d', created), callback, end_kind(state), function(told)
    return '{"id":' .. cjson.encode(id) .. ',"state":"' .. state .. '","choices":[],"usage":' .. usage .. ',"metrics":'
      .. metrics .. ',"error":' .. problem .. ',"metadata":' .. told.metadata .. '}'
  end, now)
end

local EXPIRED = '{"code":"deadline_exceeded","message":"the deadline has passed","param":"ttl_ms"}'
local CANCELLED = '{"code":"cancelled","message":"the request was cancelled"}'
local UNWATCHED = '{"code":"cancelled","message":"nobody watches the request any more"}'

-- Ends a waiting request that is past its deadline or was cancelled. One that was begun before, and has told something,
-- can only be ended by an engine: its stream number and entry are returned.
local function end_if_over(base, group, now, member, result_ttl, replay_ttl)
  local id, stream, entry, tokens, tenant = string.match(member, '^(%S+) (%S+) (%S+) (%S+) (%S+)$')
  local wait, load = base .. 'wait', base .. 'load'
  local r = redis.call('HMGET', base .. 'req:' .. id, 'state', 'entry', 'stream', 'seq', 'attempt', 'created', 'cancel',
    'deadline', 'watch_ms')
  if r[1] ~= 'queued' or r[2] ~= entry or r[3] ~= stream then
    -- Its record is gone, or another request's: nothing is left but the count.
    uncount(wait, load, id, stream, entry, tokens, tenant)
    return
  end
  local state, problem
  if r[7] == '1' then
    state, problem = 'cancelled', CANCELLED
  elseif now > tonumber(r[8]) then
    state, problem = 'expired', EXPIRED
  elseif is_unwatched(base, id, r[9]) then
    state, problem = 'cancelled', UNWATCHED
  else
    return
  end
  if r[4] ~= '0' then return stream, entry end
  answer(base, id, state, problem, now, result_ttl, replay_ttl, r[5], tonumber(r[6]))
  remove_entry(base .. 'in:' .. stream, group, entry)
  redis.call('UNLINK', base .. 'blob:' .. id)
  uncount(wait, load, id, stream, entry, tokens, tenant)
end

local function past_deadline(base, now, limit)
  return redis.call('ZRANGEBYSCORE', base .. 'wait', '-inf', '(' .. now, 'LIMIT', 0, limit)
end

local function expire_waiting(base, group, now, result_ttl, replay_ttl)
  for _, member in ipairs(past_deadline(base, now, 16)) do
    end_if_over(base, group, now, member, result_ttl, replay_ttl)
  end
end
