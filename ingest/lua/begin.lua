-- Makes one engine the owner of an entry that was delivered to it. Repeating the call changes nothing.
-- KEYS 1 record, 2 events, 3 input stream, 4 dead letters, 5 statistics, 6 waiting, 7 load
-- ARGV 1 group, 2 entry, 3 owner, 4 request id, 5 ttl ms (of a request without a record), 6 tenant (same), 7 stream number,
--      8 seed (kept if none is kept yet), 9 grace ms, 10 prompt tokens (of a request without a record),
--      11 attempts at most, 12 "1": it will run alone, 13 requests of one tenant that may run at once or empty, 14 ms for
--      which it may go on unwatched or empty (of a request without a record), 15 callback (same; JSON or empty),
--      16 names of the prompt's beginnings, the longest first, with spaces between, 17 requests that run here, if it may be
--      offered to an engine that has one of these, or empty, 18 engines to which it may not, 19 engine that has offered it
--      to this one, or empty
-- Replies {"ok", attempt, released, seq, seed, created, deadline, now, cancel, alone, told}
--         {"lost"} not delivered to this engine (any more), {"duplicate"} or {"ended"}: the entry has been removed,
--         {"suspect", "0"}: it may have ended its last engine, and has to run alone; "1": it may have ended several
--         {"busy"}: as many requests of its tenant run as may, {"offered", engine}: that was told, it may be begun again
-- include clock
-- include records
-- include entries
-- include dead_letters
-- include load
-- include suspicion
local now = server_ms()
local entry, owner, grace = ARGV[2], ARGV[3], tonumber(ARGV[9])
local base, id = parts_of(KEYS[1])

local is_ours = is_pending(KEYS[3], ARGV[1], entry, owner)
if not is_ours and (ARGV[19] == '' or not is_pending(KEYS[3], ARGV[1], entry, ARGV[19])) then return {'lost'} end

local record = redis.call('HMGET', KEYS[1], 'state', 'entry', 'stream', 'owner', 'tokens', 'tenant', 'attempt',
  'progress', 'alone', 'crashes', 'released', 'cancel', 'deadline')
local state = record[1]
if not is_ours then
  if state and state ~= 'queued' then return {'lost'} end
  redis.call('XCLAIM', KEYS[3], ARGV[1], owner, 0, entry, 'JUSTID')
  redis.call('HINCRBY', KEYS[5], 'placed', 1)
end
if state and (record[2] ~= entry or record[3] ~= ARGV[7]) then
  -- Another entry has this id. Its events are the id's events: nothing may be published here.
  keep_dead_letter(KEYS[4], KEYS[5], KEYS[3], entry, 'duplicate_id', 'the request id is in use by another entry', '0')
  remove_entry(KEYS[3], ARGV[1], entry)
  return {'duplicate'}
end
if state and state ~= 'queued' and state ~= 'running' then
  remove_entry(KEYS[3], ARGV[1], entry)
  return {'ended'}
end

if not state then
  local created = accepted_at(entry, now)
  if redis.call('EXISTS', KEYS[2]) == 1 then redis.call('UNLINK', KEYS[2]) end
  redis.call('HSET', KEYS[1], 'state', 'queued', 'attempt', 0, 'released', 0, 'seq', 0, 'owner', '', 'stream', ARGV[7], 'entry', entry,
    'priority', ARGV[7], 'tenant', ARGV[6], 'created', created, 'deadline', created + tonumber(ARGV[5]),
    'tokens', ARGV[10])
  redis.call('PEXPIREAT', KEYS[1], math.max(created + tonumber(ARGV[5]), now) + grace)
  start_watch(base, id, ARGV[14])
  if ARGV[15] ~= '' then redis.call('HSET', KEYS[1], 'callback', ARGV[15]) end
end
local tenant = record[6] or ARGV[6]
local is_over = record[12] == '1' or record[13] and now > tonumber(record[13])
if ARGV[17] ~= '' and not is_over and state ~= 'running' and (record[9] or '') == '' then
  -- include placement
  local avoided = {}
  for _, engine in ipairs(words_of(ARGV[18])) do avoided[engine] = true end
  local warmer, name = warmer_engine(base, owner, words_of(ARGV[16]), avoided, now)
  if warmer and redis.call('XADD', base .. 'to:' .. warmer, 'NOMKSTREAM', 'MAXLEN', '~', 1000, '*', 'offer', name,
    'from', owner, 'stream', ARGV[7], 'entry', entry, 'running', ARGV[17]) then
    return {'offered', warmer}
  end
end
if ARGV[13] ~= '' and not is_over then
  -- A set, not a counter, and each request in it until its deadline at most: what is lost in an accident mends itself.
  local running = base .. 'run:' .. tenant
  redis.call('ZREMRANGEBYSCORE', running, '-inf', now)
  if not redis.call('ZSCORE', running, id) and redis.call('ZCARD', running) >= tonumber(ARGV[13]) then
    if not state then
      local deadline = redis.call('HGET', KEYS[1], 'deadline')
      count(KEYS[6], KEYS[7], id, ARGV[7], entry, ARGV[10], tenant, deadline)
    end
    return {'busy'}
  end
end

if state ~= 'running' or record[4] ~= owner then
  if state then
    local alone, burns, crashes = suspicion({state, record[7], record[8], record[9], record[10]})
    local burnt = tonumber(record[7]) - tonumber(record[11])
    if state == 'running' and not burns then burnt = burnt - 1 end
    local runs = not is_over and burnt < tonumber(ARGV[11])
    if alone ~= '' and ARGV[12] ~= '1' and runs then
      return {'suspect', (alone == '2' or burnt > 1) and '1' or '0'}
    end
    if state == 'running' and not burns then redis.call('HINCRBY', KEYS[1], 'released', 1) end
    redis.call('HSET', KEYS[1], 'alone', alone, 'crashes', crashes)
  end
  redis.call('HINCRBY', KEYS[1], 'attempt', 1)
  redis.call('HSET', KEYS[1], 'state', 'running', 'owner', owner)
  redis.call('HSETNX', KEYS[1], 'seed', ARGV[8])
  redis.call('HSETNX', KEYS[1], 'started', now)
  redis.call('HINCRBY', KEYS[5], 'begun', 1)
end
if record[5] then uncount(KEYS[6], KEYS[7], ARGV[4], ARGV[7], entry, record[5], record[6]) end
local r = redis.call('HMGET', KEYS[1], 'attempt', 'released', 'seq', 'seed', 'created', 'deadline', 'cancel', 'alone', 'told')
local expiry = math.max(tonumber(r[6]), now) + grace
if ARGV[13] ~= '' and not is_over then
  redis.call('ZADD', base .. 'run:' .. tenant, expiry, id)
  redis.call('PEXPIRE', base .. 'run:' .. tenant, 691200000)
end
if ARGV[16] ~= '' then
  -- include placement
  redis.pcall('SADD', base .. 'warm:' .. owner, unpack(words_of(ARGV[16])))
  redis.call('PEXPIRE', base .. 'warm:' .. owner, WARM_TTL_MS)
end
redis.call('PEXPIREAT', KEYS[1], expiry)
if redis.call('EXISTS', KEYS[2]) == 1 then redis.call('PEXPIREAT', KEYS[2], expiry) end
return {'ok', r[1], r[2], r[3], r[4], r[5], r[6], tostring(now), r[7] or '0', r[8] or '', r[9] or ''}
