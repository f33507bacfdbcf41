-- Tells the engines that live that entries are there for whoever looks first. To one that has no room it says so later.
local function tell_to_look(base, owner)
  for _, engine in ipairs(redis.call('ZRANGEBYSCORE', base .. 'hb', '(0', '+inf')) do
    if engine ~= owner then
      redis.call('XADD', base .. 'to:' .. engine, 'NOMKSTREAM', 'MAXLEN', '~', 1000, '*', 'look', owner)
    end
  end
end
