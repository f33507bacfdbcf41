-- What a record's key says: the beginning of every key of its shard, and the request's id.
local function parts_of(record)
  local base, id = string.match(record, '^(.-}:)req:(.*)$')
  return base, id
end

-- Whether a request is to be watched (`watch_ms` of its record) and nobody has said lately that he does.
local function is_unwatched(base, id, watch_ms)
  return watch_ms and watch_ms ~= '' and redis.call('EXISTS', base .. 'watch:' .. id) == 0
end

-- Begins the time for which a request may go on with nobody watching it.
local function start_watch(base, id, watch_ms)
  if watch_ms == '' then return end
  redis.call('HSET', base .. 'req:' .. id, 'watch_ms', watch_ms)
  redis.call('SET', base .. 'watch:' .. id, '1', 'PX', watch_ms)
end
