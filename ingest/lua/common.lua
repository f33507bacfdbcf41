-- Put before every script: what several of them need.

-- Live events: SPUBLISH on a Cluster, where a message then stays at its shard's node.
local PUBLISH = 'PUBLISH'

-- The server's clock in ms since the epoch: the only clock that deadlines and heartbeats know.
local function server_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- What a record's key says: the beginning of every key of its shard, and the request's id.
local function parts_of(record)
  local base, id = string.match(record, '^(.-}:)req:(.*)$')
  return base, id
end

-- Whether a request is to be watched (`watch_ms` of its record) and nobody has said lately that he does.
local function is_unwatched(base, id, watch_ms)
  return watch_ms and watch_ms ~= '' and redis.call('EXISTS', base .. 'watch:' .. id) == 0
end

-- Whether an entry was delivered to this consumer and to nobody since. False where stream or group are gone.
local function is_pending(stream, group, entry, consumer)
  local pending = redis.pcall('XPENDING', stream, group, entry, entry, 1)
  return not pending.err and #pending > 0 and pending[1][2] == consumer
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

-- The last entry of a stream that was delivered to anybody. Where there is no group nothing was.
local function last_delivered(stream, group)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  if not groups.err then
    for _, flat in ipairs(groups) do
      local info = {}
      for i = 1, #flat, 2 do info[flat[i]] = flat[i + 1] end
      if info.name == group then return info['last-delivered-id'] end
    end
  end
  return '0-0'
end

-- Whether an entry is in its stream and no consumer has been given it.
local function is_undelivered(stream, group, entry)
  if not is_after(entry, last_delivered(stream, group)) then return false end
  local pending = redis.pcall('XPENDING', stream, group, entry, entry, 1)
  if not pending.err and #pending > 0 then return false end
  return #redis.call('XRANGE', stream, entry, entry) > 0
end

local function holds_nothing(stream, group, consumer)
  local pending = redis.pcall('XPENDING', stream, group, '-', '+', 1, consumer)
  return not pending.err and #pending == 0
end

local function remove_entry(stream, group, entry)
  redis.call('XACK', stream, group, entry)
  redis.call('XDEL', stream, entry)
end

-- Copies an entry's fields, cut to 64 KiB each, to the dead letters.
local function keep_dead_letter(letters, statistics, stream, entry, reason, problem, attempts)
  local found = redis.call('XRANGE', stream, entry, entry)[1]
  if not found then return end
  local letter = {'reason', reason, 'error', problem, 'attempts', attempts, 'stream', stream, 'entry', entry}
  for i = 1, math.min(#found[2], 128) do letter[#letter + 1] = string.sub(found[2][i], 1, 65536) end
  redis.call('XADD', letters, 'MAXLEN', '~', 10000, '*', unpack(letter))
  redis.call('HINCRBY', statistics, 'dead_letters', 1)
end

-- Publishes ARGV[first...], of which the first has number offset + 1; those up to seq are there already. Returns the new seq.
local function publish(events, channel, seq, offset, first)
  for i = first + seq - offset, #ARGV do
    seq = seq + 1
    redis.call('XADD', events, seq .. '-0', 'e', ARGV[i])
    redis.call(PUBLISH, channel, seq .. ' ' .. ARGV[i])
  end
  return seq
end
