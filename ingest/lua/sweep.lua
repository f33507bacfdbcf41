-- Ends waiting requests that are past their deadline, or were cancelled by hand, though no engine has room for them.
-- KEYS 1 waiting
-- ARGV 1 group, 2 owner (empty: a reader, which can take nothing), 3 key base, 4 place in the waiting list to look for cancels from, 5 how many to look at,
--      6 result ttl ms, 7 replay ttl ms
-- Replies {next place, {{stream number, entry, {fields}}, ...}, server ms}: entries that were given back after they had told
-- something. They are this engine's now, for it to end them.
-- include clock
-- include publish
-- include records
-- include entries
-- include hooks
-- include load
-- include waiting
-- Writes nothing, but a script that has written is let through by a full server; an end makes room.
redis.call('ZREM', KEYS[1], '')
local now = server_ms()
local first, limit = tonumber(ARGV[4]), tonumber(ARGV[5])
local given = {}

local function look_at(member)
  local stream, entry = end_if_over(ARGV[3], ARGV[1], now, member, ARGV[6], ARGV[7])
  if not stream or ARGV[2] == '' then return end
  local claimed = redis.call('XCLAIM', ARGV[3] .. 'in:' .. stream, ARGV[1], ARGV[2], 0, entry)
  if claimed[1] and claimed[1][2] then given[#given + 1] = {tonumber(stream), entry, claimed[1][2]} end
  local id, _, _, tokens, tenant = string.match(member, '^(%S+) (%S+) (%S+) (%S+) (%S+)$')
  uncount(KEYS[1], ARGV[3] .. 'load', id, stream, entry, tokens, tenant)
end

local due = past_deadline(ARGV[3], now, limit)
for _, member in ipairs(due) do look_at(member) end
local some = redis.call('ZRANGE', KEYS[1], first, first + limit - 1)
for _, member in ipairs(some) do look_at(member) end
return {#some < limit and 0 or first + limit, given, now}
