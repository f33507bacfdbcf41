-- Requests that are accepted and have not begun, and the sums over them.
-- `wait`: sorted set, deadline (server ms) by "<id> <stream> <entry> <prompt tokens> <tenant>": all that is needed to
-- take a request out of the sums again, even if its record is gone.
-- `load`: hash, the sums over `wait`: requests and prompt tokens by priority (n0 t0 n1 ...) and by tenant (n@x t@x).
-- Only `count` and `uncount` write them, always both, so they cannot drift apart; the sums first, so that where these
-- cannot be written neither is.

local WAIT_TTL_MS = 691200000 -- longer than any deadline

local function add_load(load, stream, tenant, tokens, sign)
  for field, by in pairs({
    ['n' .. stream] = sign, ['t' .. stream] = sign * tokens, ['n@' .. tenant] = sign, ['t@' .. tenant] = sign * tokens,
  }) do
    if by ~= 0 and redis.call('HINCRBY', load, field, string.format('%d', by)) == 0 then
      redis.call('HDEL', load, field)
    end
  end
end

local function count(wait, load, id, stream, entry, tokens, tenant, deadline)
  local member = table.concat({id, stream, entry, tokens, tenant}, ' ')
  if redis.call('ZSCORE', wait, member) then return end
  add_load(load, stream, tenant, tonumber(tokens), 1)
  redis.call('ZADD', wait, deadline, member)
  redis.call('PEXPIRE', wait, WAIT_TTL_MS)
  redis.call('PEXPIRE', load, WAIT_TTL_MS)
end

local function uncount(wait, load, id, stream, entry, tokens, tenant)
  local member = table.concat({id, stream, entry, tokens, tenant}, ' ')
  if not redis.call('ZSCORE', wait, member) then return end
  add_load(load, stream, tenant, tonumber(tokens), -1)
  redis.call('ZREM', wait, member)
end
