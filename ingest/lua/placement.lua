-- Which engine has the beginning of a prompt in its pool.
-- `warm:<engine>`: set, the names of those that an engine has (see ingest/placement.py); renewed with its heartbeat.
-- `to:<engine>`: stream with the group of the input streams, what other engines tell it.

local WARM_TTL_MS = 60000
local BEAT_MS = 2500 -- engines beat every second; one that is later than this is not waited for

-- Which of these names an engine has told of. A key of another kind in the place of the set tells of none.
local function held_by(base, engine, names)
  local held = redis.pcall('SMISMEMBER', base .. 'warm:' .. engine, unpack(names))
  return held.err and {} or held
end

-- The engine that has more of a request than `owner` has, and the name of what it has; nil where there is none. `names`:
-- the longest first. `avoided`: engines that have lately had no room.
local function warmer_engine(base, owner, names, avoided, now)
  local least = #names
  for i, held in ipairs(held_by(base, owner, names)) do
    if held == 1 then least = i - 1 break end
  end
  if least == 0 then return nil end
  local found
  for _, engine in ipairs(redis.call('ZRANGEBYSCORE', base .. 'hb', now - BEAT_MS, '+inf')) do
    if engine ~= owner and not avoided[engine] then
      for i, held in ipairs(held_by(base, engine, names)) do
        if held == 1 and i <= least then
          found, least = engine, i - 1
          break
        end
      end
      if least == 0 then break end
    end
  end
  return found, names[least + 1]
end

local function words_of(text)
  local words = {}
  for word in string.gmatch(text, '%S+') do words[#words + 1] = word end
  return words
end
