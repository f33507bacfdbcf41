-- What a command says of a stream and its group; nothing where these have gone. Any other error is the caller's: passed
-- over, a user who may not ask would look like a stream that has nothing.
local function ask(...)
  local reply = redis.pcall(...)
  if type(reply) ~= 'table' or not reply.err then return reply end
  if string.find(reply.err, 'NOGROUP', 1, true) or string.find(reply.err, 'no such key', 1, true) then return {} end
  error(reply)
end

-- Whether an entry was delivered to this consumer and to nobody since. False where stream or group are gone.
local function is_pending(stream, group, entry, consumer)
  local pending = ask('XPENDING', stream, group, entry, entry, 1)
  return #pending > 0 and pending[1][2] == consumer
end

-- Whether one entry id comes after another, as the server compares them.
local function is_after(entry, other)
  local ms, seq = string.match(entry, '^(%d+)-(%d+)$')
  local other_ms, other_seq = string.match(other, '^(%d+)-(%d+)$')
  -- Compared as text: Lua's numbers do not hold 64 bits.
  if ms ~= other_ms then
    return #ms > #other_ms or #ms == #other_ms and ms > other_ms
  end
  return #seq > #other_seq or #seq == #other_seq and seq > other_seq
end

-- Where what comes after an entry begins, as in XRANGE. Nil after the greatest id that there is: nothing can come, and the
-- server refuses to be asked.
local function beyond(entry)
  return entry ~= '18446744073709551615-18446744073709551615' and '(' .. entry or nil
end

-- What the server says of a group; nil where there is none.
local function group_of(stream, group)
  for _, flat in ipairs(ask('XINFO', 'GROUPS', stream)) do
    local info = {}
    for i = 1, #flat, 2 do info[flat[i]] = flat[i + 1] end
    if info.name == group then return info end
  end
end

-- The last entry of a stream that was delivered to anybody. Where there is no group nothing was.
local function last_delivered(stream, group)
  local told = group_of(stream, group)
  return told and told['last-delivered-id'] or '0-0'
end

-- The consumer that holds what is nobody's: it waits for its next attempt, or for whoever looks first.
local DELAYED = 'delayed'

-- Whether an entry is in its stream and no engine has it: it was given to none yet, or was given back.
local function is_nobodys(stream, group, entry)
  local pending = ask('XPENDING', stream, group, entry, entry, 1)
  if #pending > 0 and pending[1][2] ~= DELAYED then return false end
  if #pending == 0 and not is_after(entry, last_delivered(stream, group)) then return false end
  return #redis.call('XRANGE', stream, entry, entry) > 0
end

local function field_of(fields, name)
  for i = 1, #fields, 2 do
    if fields[i] == name then return fields[i + 1] end
  end
end

local function holds_nothing(stream, group, consumer)
  return #ask('XPENDING', stream, group, '-', '+', 1, consumer) == 0
end

-- The heartbeat of an engine that has left while it held something.
local LEFT = 0

-- Of all the streams keys[first], keys[first + 1] ...
local function holds_nothing_of(keys, first, group, consumer)
  for i = first, #keys do
    if not holds_nothing(keys[i], group, consumer) then return false end
  end
  return true
end

local function remove_entry(stream, group, entry)
  redis.call('XACK', stream, group, entry)
  redis.call('XDEL', stream, entry)
end

-- A raw producer's request was accepted when the server stamped its entry. An id made by hand says nothing about time.
local function accepted_at(entry, now)
  local created = tonumber(string.match(entry, '^(%d+)-'))
  if created > now or created < now - 604800000 then return now end
  return created
end
