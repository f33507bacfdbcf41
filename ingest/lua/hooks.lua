-- Put before scripts that begin or end a request with a callback: its webhooks go into the outbox in the same step.
-- `hook:due`: sorted set, server ms from which on a delivery may be sent by its id. `hook:<id>`: hash, the delivery:
-- request, tenant, type, url, secret (a name), data (JSON), created, state, tries.

local HOOK_TTL_MS = 604800000

-- Writes one delivery; a repeated call, or a second engine that begins the request, changes nothing: its id is a
-- function of request and type. `callback`: JSON as in ingest/callback.py. `data`: JSON, or a function that makes it.
local function put_hook(base, id, created, callback, kind, data, now)
  local read, told = pcall(cjson.decode, callback)
  if not read or type(told) ~= 'table' or type(told.events) ~= 'table' then return end
  local wanted = false
  for _, name in ipairs(told.events) do wanted = wanted or name == kind end
  if not wanted then return end
  local name = 'msg_' .. redis.sha1hex(base .. id .. ' ' .. created .. ' ' .. kind)
  local key = base .. 'hook:' .. name
  if redis.call('EXISTS', key) == 1 then return end
  if type(data) == 'function' then data = data(told) end
  local tenant = redis.call('HGET', base .. 'req:' .. id, 'tenant') or 'default'
  redis.call('HSET', key, 'request', id, 'tenant', tenant, 'type', kind, 'url', told.url, 'secret', told.secret,
    'data', data, 'created', now, 'state', 'waiting', 'tries', 0)
  redis.call('PEXPIRE', key, HOOK_TTL_MS)
  redis.call('ZADD', base .. 'hook:due', now, name)
end

local function end_kind(state)
  if state == 'completed' or state == 'cancelled' then return 'request.' .. state end
  return 'request.failed'
end
