-- Put before scripts that look at what engines have left behind (after entries.lua): which consumers have no engine.

-- A function that says of a consumer whether its engine is dead or has left, or nil: whoever has no heartbeat itself cannot
-- tell. By one that is not fresh by this clock it cannot tell either who is dead: it was asleep, the clock was set, or
-- somebody has deleted the list. `old_beats_count`: whether heartbeats that are old mean death.
local function judge_of_death(heartbeats, owner, now, timeout, old_beats_count)
  local own = redis.call('ZSCORE', heartbeats, owner)
  if not own then return nil end
  local knows = old_beats_count and math.abs(now - tonumber(own)) <= timeout / 2
  return function(consumer)
    if consumer == DELAYED then return true end
    local beat = tonumber(redis.call('ZSCORE', heartbeats, consumer))
    if not beat then redis.call('ZADD', heartbeats, now, consumer) return false end
    return beat == LEFT or knows and math.abs(now - beat) > timeout
  end
end

-- Those of a stream's group, with what the server says of them.
local function dead_consumers(stream, group, owner, is_dead)
  local dead = {}
  for _, info in ipairs(ask('XINFO', 'CONSUMERS', stream, group)) do
    local consumer = {}
    for i = 1, #info, 2 do consumer[info[i]] = info[i + 1] end
    if consumer.name ~= owner and is_dead(consumer.name) then dead[#dead + 1] = consumer end
  end
  return dead
end
