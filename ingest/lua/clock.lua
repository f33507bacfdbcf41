-- The server's clock in ms since the epoch: the only clock that deadlines and heartbeats know.
local function server_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
