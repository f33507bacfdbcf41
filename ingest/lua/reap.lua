-- Takes over entries whose consumer has no fresh heartbeat, and removes dead consumers that hold nothing any more.
-- KEYS 1 input stream, 2 heartbeats
-- ARGV 1 group, 2 owner, 3 heartbeat timeout ms, 4 entries at most
-- Replies the entries taken, as XRANGE does
local now = server_ms()
local left = tonumber(ARGV[4])
local taken = {}
for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local consumer = {}
  for i = 1, #info, 2 do consumer[info[i]] = info[i + 1] end
  local beat = redis.call('ZSCORE', KEYS[2], consumer.name)
  if consumer.name ~= ARGV[2] and (not beat or tonumber(beat) < now - tonumber(ARGV[3])) then
    if consumer.pending > 0 and left > 0 then
      local pending = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', left, consumer.name)
      for _, item in ipairs(pending) do
        -- JUSTID would not tell an entry that was deleted while pending from one that is there.
        local claimed = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, item[1])
        if claimed[1] and claimed[1][2] then
          taken[#taken + 1] = claimed[1]
          left = left - 1
        else
          redis.call('XACK', KEYS[1], ARGV[1], item[1])
        end
      end
    end
    -- Deleting a consumer throws its pending entries away, so only one that has none.
    if holds_nothing(KEYS[1], ARGV[1], consumer.name) then
      redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], consumer.name)
    end
  end
end
return taken
