-- Gives entries back, as an engine that leaves does. They are nobody's then and due at once, and the others are told to look:
-- whoever has room takes them now, and not when it would have looked anyway. No attempt is burnt. Whoever has called this is
-- offered nothing any more, and its reads fail, one that waits included, so that nothing is brought to it either.
-- Repeating the call changes nothing.
-- KEYS 1 what this engine is told, 2 names of the prompt beginnings that it has, 3 delayed entries, 4 waiting, 5 load,
--      6 input stream
-- ARGV 1 group, 2 owner, 3 stream number, 4 where to begin, as in XPENDING, 5 entries at most, 6 key base,
--      7 "1": those that run at this engine, too
-- Replies where to go on, empty where nothing is left
-- include clock
-- include entries
-- include load
-- include look
redis.call('UNLINK', KEYS[1], KEYS[2]) -- first, since a full server lets through what has freed something
local key, group, owner, base = KEYS[6], ARGV[1], ARGV[2], ARGV[6]
local now, given = server_ms(), 0

-- The id and the record of an entry's request if it runs at this engine.
local function running(entry, fields)
  local id = field_of(fields, 'id')
  local r = id and redis.pcall('HMGET', base .. 'req:' .. id, 'state', 'owner', 'entry', 'stream', 'tokens', 'tenant',
    'deadline')
  local runs = r and not r.err and r[1] == 'running' and r[2] == owner and r[3] == entry and r[4] == ARGV[3]
  if runs then return id, r end
end

local function stop(id, r)
  redis.call('HSET', base .. 'req:' .. id, 'state', 'queued', 'owner', '')
  redis.call('HINCRBY', base .. 'req:' .. id, 'released', 1)
  redis.call('ZREM', base .. 'run:' .. r[6], id)
  if r[5] then count(KEYS[4], KEYS[5], id, r[4], r[3], r[5], r[6], r[7]) end
end

local page = ask('XPENDING', key, group, ARGV[4], '+', ARGV[5], owner)
for _, item in ipairs(page) do
  local entry = item[1]
  local found = redis.call('XRANGE', key, entry, entry)[1]
  local id, r
  if found then id, r = running(entry, found[2]) end
  if not found then
    redis.call('XACK', key, group, entry)
  elseif not id or ARGV[7] == '1' then
    if id then stop(id, r) end
    redis.call('XCLAIM', key, group, DELAYED, 0, entry, 'JUSTID')
    redis.call('ZADD', KEYS[3], now, ARGV[3] .. ' ' .. entry)
    given = given + 1
  end
end
if given > 0 then tell_to_look(base, owner) end
return #page == tonumber(ARGV[5]) and beyond(page[#page][1]) or ''
